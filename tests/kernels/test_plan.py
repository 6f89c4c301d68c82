"""How work is divided: that chips are filled, and that nothing exceeds what they have."""

import jax.numpy as jnp
import pytest

from kvjax.kernels.mosaic_gpu.plan import (
    SHARED_BYTES,
    SYSTEM_BYTES,
    Shape,
    choose_splits,
    make_plan,
    shared_bytes,
    split_cost,
)
from kvjax.kernels.mosaic_gpu.tiles import value_cuts

H100 = 132  # multiprocessors


def shape(batch=1, kv_heads=8, group=8, dims=(128, 128), slots=8192, stored=jnp.bfloat16):
    operand = jnp.bfloat16 if stored in (jnp.bfloat16, jnp.int8) else jnp.float16
    return Shape(batch, kv_heads, group, dims[:1], dims[1], slots, operand, stored)


def waste(plan, pairs) -> float:
    """Share of a chip's time in which it waits for the last wave of blocks."""
    places = plan.residents * H100
    blocks = pairs * plan.splits
    waves = -(-blocks // places)
    return 1 - blocks / (waves * places)


@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 8), (1, 1), (2, 4), (4, 8), (8, 8)])
def test_few_long_rows_fill_the_chip(batch, kv_heads):
    plan = make_plan(shape(batch, kv_heads, slots=131072), "wgmma", H100)
    assert waste(plan, batch * kv_heads) < 0.1


@pytest.mark.parametrize("batch", [64, 128, 512])
def test_many_rows_are_hardly_split(batch):
    """Whole waves of them: splits past two only write more parts."""
    plan = make_plan(shape(batch, slots=16384), "wgmma", H100)
    assert plan.splits <= 2


def test_a_short_row_has_no_more_splits_than_tiles():
    assert make_plan(shape(slots=64), "wgmma", H100).splits == 1
    assert make_plan(shape(slots=128), "wgmma", H100).splits <= 2


def test_splits_end_with_the_wave():
    """Of 33 splits for 8 rows, 264 blocks are one wave of 2 x 132; one more would be two."""
    assert choose_splits(8, 2048, 2 * H100, cost=4) == 33


def test_parts_as_large_as_the_cache_are_not_worth_it():
    """One KV head of 64 queries in 8 bits: a part is 4 tiles to write and to read again."""
    few, many = (shape(4, 1, group, stored=jnp.int8) for group in (8, 64))
    assert split_cost(many, 64) == split_cost(few, 8) + 4
    assert make_plan(many, "wgmma", H100).splits <= make_plan(few, "wgmma", H100).splits


@pytest.mark.parametrize("unit", ["wgmma", "mma"])
@pytest.mark.parametrize("stored", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8])
@pytest.mark.parametrize("group", [1, 8, 16, 33, 64, 71, 128])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_shared_memory_suffices(dims, group, stored, unit):
    wanted = shape(group=group, dims=dims, stored=stored)
    plan = make_plan(wanted, unit, H100)
    fixed, stage = shared_bytes(wanted, unit, plan.heads)
    assert plan.stages >= 2
    assert plan.residents * (fixed + plan.stages * stage + SYSTEM_BYTES) <= SHARED_BYTES
    parts = -(-group // plan.heads)
    assert parts * plan.heads - group < 8 * parts  # no more than what fills up to 8


def test_latents_are_held_once():
    """64 rows of 576 in bf16, whatever the values: they are the latents themselves."""
    latents = Shape(1, 1, 16, (512, 64), 0, 8192, jnp.bfloat16, jnp.bfloat16)
    assert shared_bytes(latents, "wgmma", 16)[1] == 64 * 576 * 2


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 144, 192, 256])
def test_cuts_cover_all_columns(dim):
    covered = {column for first, many in value_cuts(dim) for column in range(first, first + many)}
    assert covered == set(range(dim))
    assert all(many % 64 == 0 for _, many in value_cuts(dim))
