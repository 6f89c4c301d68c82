"""Laws 3 and 4 on the compiled step of latent attention: it makes no key or value of a head.

One layer of DeepSeek-V3's heads on a narrow stream, one new token a row. Shown by its temporaries,
which hold a few copies of one block of latents whatever the capacity, and by its FLOP, which are
those of the absorbed form. Nothing is allocated: the steps are compiled for shapes.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kvjax.cache import Block, LayoutChoice, Paged, Record, Sight, init_layer_cache
from kvjax.nn import LatentAttention, LatentAttentionConfig, Rope
from kvjax.ops import attend, decode_attention
from kvjax.sizing import LayerSpec
from laws.compiled import BLOCK, SLACK, Memory, assert_in_place

BATCH, D_MODEL, HEADS, LATENT, ROPE, HEAD, VALUE = 2, 64, 128, 512, 64, 128, 128
SHORT, LONG = 4 * 1024, 32 * 1024
CONFIG = LatentAttentionConfig(
    d_model=D_MODEL,
    query_heads=HEADS,
    latent_rank=LATENT,
    rope_dim=ROPE,
    head_dim=HEAD,
    head_value_dim=VALUE,
    rope=Rope(ROPE),
)
SPEC = LayerSpec(HEADS, 1, HEAD + ROPE, VALUE, kind="latent", latent_rank=LATENT, rope_dim=ROPE)
# A token's record as attention reads it: the key, latent and rope key side by side; the value; and
# the value with what is dead silenced.
TEMP_BLOCK = BATCH * BLOCK * ((LATENT + ROPE) + 2 * LATENT) * 4
# Two copies of scores, and of absorbed queries.
TEMP_HEADS = 2 * BATCH * HEADS * (BLOCK + LATENT + ROPE) * 4
MOST_TEMP = TEMP_BLOCK + TEMP_HEADS
# For FLOP that are of no product: softmax, rotation, bf16 made f32.
TOLERANCE = 0.02


class Step(NamedTuple):
    """A step over a cache of so many slots a row."""

    capacity: int = SHORT
    codec: str = "f32"
    layout: LayoutChoice = "dense"


STEPS = pytest.mark.parametrize(
    "step",
    [
        Step(codec=codec, layout=layout)
        for layout in ("dense", Paged(64))
        for codec in ("f32", "bf16")
    ],
    ids=["dense f32", "dense bf16", "pages f32", "pages bf16"],
)


def shapes(step: Step) -> tuple:
    """The arguments of a step, as shapes."""
    module = nnx.eval_shape(lambda: CONFIG.build(jnp.float32, nnx.Rngs(0)))
    empty = jax.eval_shape(
        lambda: init_layer_cache(
            BATCH,
            step.capacity,
            kv_heads=CONFIG.kv_heads,
            key_dim=CONFIG.key_dim,
            value_dim=CONFIG.value_dim,
            layout=step.layout,
            codec=step.codec,
        )
    )
    x = jax.ShapeDtypeStruct((BATCH, 1, D_MODEL), jnp.float32)
    return module, x, jax.ShapeDtypeStruct((BATCH, 1), jnp.int32), empty


def compile_anew(step: Step, donated: tuple[int, ...] = (3,)) -> jax.stages.Compiled:
    """In a world that may have been changed."""
    function = jax.jit(lambda module, *rest: module(*rest), donate_argnums=donated)
    return function.lower(*shapes(step)).compile()


compiled = cache(compile_anew)


def memory(step: Step, program: jax.stages.Compiled) -> Memory:
    found = program.memory_analysis()
    return Memory(
        cache=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes(step)[3])),
        alias=found.alias_size_in_bytes,
        output=found.output_size_in_bytes,
        temp=found.temp_size_in_bytes,
        logits=BATCH * D_MODEL * 4,
    )


def assert_nothing_is_expanded(compiling: Callable, step: Step) -> None:
    """Law 3, of temporaries: no head's keys or values of the cache, nor all heads' of a block."""
    short, long = (memory(s, compiling(s)).temp for s in (step, step._replace(capacity=LONG)))
    assert abs(long - short) <= SLACK
    assert max(short, long) <= MOST_TEMP


def products_of_projections() -> int:
    """FLOP of one row's products with parameters, absorbed."""
    per_head = D_MODEL * (HEAD + ROPE) + HEAD * LATENT + LATENT * VALUE + VALUE * D_MODEL
    return 2 * (HEADS * per_head + D_MODEL * (LATENT + ROPE))


def assert_flop_are_absorbed(program: jax.stages.Compiled) -> None:
    """Projections, and one block of latents: XLA counts a loop's body once."""
    flop = program.cost_analysis()["flops"] / BATCH
    of_block = 2 * HEADS * (2 * LATENT + ROPE) * BLOCK
    assert flop == pytest.approx(products_of_projections() + of_block, rel=TOLERANCE)
    attention = flop - products_of_projections()
    assert attention == pytest.approx(SPEC.decode_flop(BLOCK), rel=TOLERANCE)


def test_the_bounds_are_far_below_what_is_expanded():
    """Even in bf16: of one head's keys of long rows, and of all heads' of one block."""
    assert 1.5 * MOST_TEMP < BATCH * LONG * HEAD * 2
    assert 1.5 * MOST_TEMP < BATCH * BLOCK * HEADS * HEAD * 2


@STEPS
def test_the_cache_is_written_in_place(step):
    assert_in_place(memory(step, compiled(step)))


@STEPS
def test_nothing_is_expanded(step):
    assert_nothing_is_expanded(compiled, step)


@STEPS
def test_flop_are_those_of_the_absorbed_form(step):
    assert_flop_are_absorbed(compiled(step))
    # So it is a block that was counted, and not the capacity.
    longer = compiled(step._replace(capacity=LONG))
    assert longer.cost_analysis()["flops"] == compiled(step).cost_analysis()["flops"]


def test_without_donation_it_shows():
    with pytest.raises(AssertionError):
        assert_in_place(memory(Step(), compile_anew(Step(), donated=())))


def at_once(module, q, q_rope, unrotated, positions, cache, new=()):
    """Keys and values of all heads made of the whole cache, then attended."""
    k, v = module.expand(Record(*(cache.leaves[name].astype(q.dtype) for name in "kv")))
    q = jnp.concatenate([q, q_rope], axis=-1)[:, 0]
    out = decode_attention(q, k, v, cache.n, scale=module.config.factor)
    return out[:, None], None


def by_block(module, q, q_rope, unrotated, positions, cache, new=()):
    """Keys and values of all heads made of one block at a time."""

    def expand(block: Block) -> Block:
        parts = (part.astype(q.dtype) for part in (block.k, block.v))
        return Block(*module.expand(Record(*parts)), block.pos)

    class Expanded(NamedTuple):
        n: jax.Array = cache.n
        sight: Sight = cache.sight
        blocks: Callable = cache.blocks
        first_block: Callable = cache.first_block

        def block(self, i):
            return expand(cache.block(i))

        def operands(self):
            return None

    q = jnp.concatenate([q, q_rope], axis=-1)
    return attend(q, Expanded(), positions, scale=module.config.factor)


def one_head_at_once(module, q, q_rope, unrotated, positions, cache, new=()):
    """Absorbed, and beside it one head's keys made of the whole cache, and read."""
    out, lse = ABSORBED(module, q, q_rope, unrotated, positions, cache, new)
    latent = cache.leaves["v"][:, 0].astype(q.dtype)
    k = jax.lax.optimization_barrier(latent @ module.k_up[...][0].T)
    return out.at[:, :, 0, 0].add(jnp.einsum("bth,bsh->bt", q[:, :, 0], k)), lse


ABSORBED = LatentAttention._over_latents


@pytest.mark.parametrize("expanded", [at_once, by_block, one_head_at_once])
def test_an_expanded_cache_shows(expanded, monkeypatch):
    monkeypatch.setattr(LatentAttention, "_over_latents", expanded)
    compiled = cache(compile_anew)
    with pytest.raises(AssertionError):
        assert_nothing_is_expanded(compiled, Step())
    with pytest.raises(AssertionError):
        assert_flop_are_absorbed(compiled(Step()))
