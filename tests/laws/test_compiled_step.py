"""Laws 3 and 4 on the compiled step of a model of several layers: its memory, and its loops.

Nothing is allocated: the steps are compiled for shapes. Absolute temporaries mislead, since XLA
on CPU keeps some for the weights, so they are compared between two capacities and two values of
N/K. Each check has controls beside it that take something away and must be caught.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kvjax.cache import Block, Sight, SlotCache
from kvjax.engine import decode, prefill
from kvjax.nn import AttentionConfig, Decoder, DecoderConfig, MlpConfig, Rope, attention
from kvjax.ops import attend

SLACK = 64 * 1024
SHORT, LONG = 8 * 1024, 64 * 1024
LAYERS, KV_HEADS, HEAD_DIM, VOCAB, BLOCK = 4, 2, 32, 64, 512


class Step(NamedTuple):
    """What is compiled: a step of T tokens for one row of `capacity`, with N query heads."""

    tokens: int
    capacity: int = SHORT
    codec: str = "f32"
    query_heads: int = 8

    @property
    def score_bytes(self) -> int:
        """Of the new tokens against one block; with it attention's activations grow."""
        return self.query_heads * self.tokens * BLOCK * 4


class Memory(NamedTuple):
    """Bytes, as XLA reports them of a compiled step."""

    cache: int
    alias: int
    output: int
    temp: int
    logits: int


def shapes(step: Step) -> tuple:
    """The arguments of a step, as shapes."""
    config = AttentionConfig(
        d_model=64,
        query_heads=step.query_heads,
        kv_heads=KV_HEADS,
        key_dim=HEAD_DIM,
        value_dim=HEAD_DIM,
        rope=Rope(HEAD_DIM),
    )
    decoder = DecoderConfig(VOCAB, 64, attention=(config,) * LAYERS, mlp=MlpConfig(96))
    model = nnx.eval_shape(lambda: Decoder(decoder, rngs=nnx.Rngs(0)))
    empty = jax.eval_shape(lambda: model.init_cache(1, step.capacity, codec=step.codec))
    tokens, count = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1, step.tokens), (1,)))
    return model, tokens, empty, count


@cache
def compiled(function: Callable, step: Step) -> jax.stages.Compiled:
    return function.lower(*shapes(step)).compile()


def measure(function: Callable, step: Step) -> Memory:
    arguments = shapes(step)
    found = compiled(function, step).memory_analysis()
    logits = jax.eval_shape(function, *arguments)[0]
    return Memory(
        cache=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments[2])),
        alias=found.alias_size_in_bytes,
        output=found.output_size_in_bytes,
        temp=found.temp_size_in_bytes,
        logits=logits.size * 4,
    )


def assert_in_place(memory: Memory) -> None:
    """Law 4: the cache is handed through, and beside it only logits come out."""
    assert memory.alias == memory.cache
    assert memory.output - memory.alias <= memory.logits + SLACK


def growth_with_capacity(function: Callable, step: Step) -> int:
    """Bytes of temporaries that a longer cache adds."""
    longer = step._replace(capacity=LONG)
    return measure(function, longer).temp - measure(function, step).temp


def growth_with_group(function: Callable, step: Step) -> int:
    """Bytes of temporaries that a larger N/K adds, beside some copies of one block's scores."""
    larger = step._replace(query_heads=4 * step.query_heads)
    scores = larger.score_bytes - step.score_bytes
    return measure(function, larger).temp - measure(function, step).temp - 4 * scores


STEPS = pytest.mark.parametrize(
    ("function", "step"),
    [
        (decode, Step(tokens=1)),
        (decode, Step(tokens=1, codec="bf16")),
        (decode, Step(tokens=8)),
        (decode, Step(tokens=8, codec="bf16")),
        (prefill, Step(tokens=64)),
    ],
    ids=["decode 1", "decode 1 bf16", "decode 8", "decode 8 bf16", "prefill 64"],
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


def donated() -> Callable:
    """`decode`, to be compiled anew in a changed world."""
    return jax.jit(lambda model, *rest: step_of(model, *rest), donate_argnums=2)


def step_of(model, tokens, cache, count):
    return model(tokens, cache, count=count)


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


def assert_loops_follow_the_length(text: str) -> None:
    """Law 4: each layer has a loop, and the compiler knows of none how often it runs."""
    loops = [line for line in text.splitlines() if re.search(r" while\(", line)]
    assert len(loops) >= LAYERS
    assert not any("known_trip_count" in line for line in loops)


def assert_only_tokens_are_written(text: str) -> None:
    """Law 4: nothing but a scatter makes a new array of the cache's shape."""
    shape = re.escape(f"f32[1,{KV_HEADS},{SHORT},{HEAD_DIM}]")
    made = set(re.findall(rf"= {shape}\S* ([a-z-]+)\(", text))
    handed_on = {"parameter", "get-tuple-element", "bitcast", "opt-barrier", "fusion"}
    assert made - handed_on <= {"scatter", "dynamic-update-slice"}
    assert made & {"scatter", "dynamic-update-slice"}


@pytest.mark.parametrize("tokens", [1, 8])
def test_cost_follows_the_live_length(tokens):
    text = compiled(decode, Step(tokens)).as_text()
    assert_loops_follow_the_length(text)
    assert_only_tokens_are_written(text)


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
        assert_only_tokens_are_written(text)
