"""Laws 3 and 4 on the compiled step of a model with plain caches.

Each check has controls beside it that take something away and must be caught.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from kvjax.cache import Block, Sight, SlotCache
from kvjax.engine import decode, prefill
from kvjax.nn import attention
from kvjax.ops import attend
from laws.compiled import (
    BLOCK,
    KV_HEADS,
    SHARING,
    SLACK,
    Step,
    assert_in_place,
    assert_loops_follow_the_length,
    assert_only_tokens_are_written,
    compiled,
    donated,
    growth_with_capacity,
    growth_with_group,
    measure,
    step_of,
)

STEPS = pytest.mark.parametrize(
    ("function", "step"),
    [
        (decode, Step(tokens=1)),
        (decode, Step(tokens=1, codec="bf16")),
        (decode, Step(tokens=8)),
        (decode, Step(tokens=8, codec="bf16")),
        (prefill, Step(tokens=64)),
        pytest.param(decode, Step(tokens=1, producers=SHARING), marks=pytest.mark.slow),
        (decode, Step(tokens=8, producers=SHARING)),
    ],
    ids=[
        *("decode 1", "decode 1 bf16", "decode 8", "decode 8 bf16", "prefill 64"),
        *("decode 1 of shared layers", "decode 8 of shared layers"),
    ],
)


@STEPS
def test_the_cache_is_written_in_place(function, step):
    assert_in_place(measure(function, step))


@STEPS
def test_temporaries_do_not_grow_with_the_capacity(function, step):
    assert abs(growth_with_capacity(function, step)) <= SLACK


@pytest.mark.parametrize("tokens", [1, 8])
def test_no_key_or_value_is_repeated_for_its_group(tokens):
    assert growth_with_group(decode, Step(tokens)) <= SLACK


def test_without_donation_it_shows():
    memory = measure(jax.jit(step_of), Step(tokens=1))
    with pytest.raises(AssertionError):
        assert_in_place(memory)


def test_without_the_barrier_it_shows(monkeypatch):
    """At T > 1 the append would be scheduled before the attention, over a copy of the cache."""
    monkeypatch.setattr(jax.lax, "optimization_barrier", lambda operands: operands)
    assert growth_with_capacity(donated(), Step(tokens=8)) > SLACK


def whole_cache(q, cache, q_positions, *, new=(), **settings):
    """Attention as if the cache were one array for jax.nn, which wants (B, S, K, H)."""
    k, v = (jnp.swapaxes(cache.leaves[name], 1, 2).astype(q.dtype) for name in "kv")
    live = jnp.arange(k.shape[1]) <= q_positions[:, :, None]
    return jax.nn.dot_product_attention(q, k, v, mask=live[:, None]), None


def repeated_heads(q, cache, q_positions, *, new=(), **settings):
    """Attention over blocks whose keys and values are written out for each query head."""

    def repeat(block: Block) -> Block:
        k, v = (jnp.repeat(x, q.shape[2] // KV_HEADS, axis=1) for x in (block.k, block.v))
        return Block(k, v, block.pos)

    class Repeated(NamedTuple):
        n: jax.Array = cache.n
        sight: Sight = cache.sight

        def first_block(self, oldest):
            return 0

        def blocks(self):
            return cache.blocks()

        def block(self, i):
            return repeat(cache.block(i))

        def operands(self):
            return None

    return attend(q, Repeated(), q_positions, new=tuple(map(repeat, new)), **settings)


def every_block(q, cache, q_positions, **settings):
    class Full(NamedTuple):
        n: jax.Array = cache.n
        sight: Sight = cache.sight
        block: Callable = cache.block

        def first_block(self, oldest):
            return 0

        def blocks(self):
            return cache.capacity // BLOCK

        def operands(self):
            return None

    return attend(q, Full(), q_positions, **settings)


def test_a_transposed_cache_shows(monkeypatch):
    monkeypatch.setattr(attention, "attend", whole_cache)
    assert growth_with_capacity(donated(), Step(tokens=1)) > SLACK


def test_repeated_heads_show(monkeypatch):
    monkeypatch.setattr(attention, "attend", repeated_heads)
    assert growth_with_group(donated(), Step(tokens=8)) > SLACK


@pytest.mark.parametrize("tokens", [1, 8])
def test_cost_follows_the_live_length(tokens):
    text = compiled(decode, Step(tokens)).as_text()
    assert_loops_follow_the_length(text)
    assert_only_tokens_are_written(text, Step(tokens))


def test_a_loop_over_the_capacity_shows(monkeypatch):
    monkeypatch.setattr(attention, "attend", every_block)
    text = compiled(donated(), Step(tokens=8)).as_text()
    with pytest.raises(AssertionError):
        assert_loops_follow_the_length(text)


def test_a_rewritten_cache_shows(monkeypatch):
    """An append that chooses between old and new for every slot."""

    def append(cache, record, count):
        slots = jnp.arange(cache.capacity)
        new = slots == cache.n[:, None]
        leaves = {
            name: jnp.where(new[:, None, :, None], getattr(record, name)[:, :, :1], leaf)
            for name, leaf in cache.leaves.items()
        }
        return replace(cache, leaves=leaves, n=cache.n + count)

    monkeypatch.setattr(SlotCache, "append", append)
    text = compiled(donated(), Step(tokens=1)).as_text()
    with pytest.raises(AssertionError):
        assert_only_tokens_are_written(text, Step(tokens=1))
