"""The kernel over latents, as a simulation with races looked for, against float64.

With "wgmma", products are the hardware's, whose reads the race detector does not see; with "mma",
ordinary reads stand for them, which it does. Neither sees whether what registers stored is fenced
before a product reads it: that is read off the traced kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from quick import rest_slow

from kernels.planting import (
    api,
    changed,
    handed_on_unfenced,
    known_barriers,
    next_page,
    raised_what_it_must,
    without_wait,
)
from kvjax.kernels.mosaic_gpu import copying, latent
from kvjax.kernels.mosaic_gpu.plan import SHARED_BYTES, SYSTEM_BYTES, Plan, Shape, make_latent_plan
from kvjax.kernels.mosaic_gpu.settings import Inputs
from kvjax.ops import merge

SCALE = 192**-0.5
# Of float32 sums, in natural logarithms.
LSE_ACCURACY = 2e-5
ROWS = 64


@dataclass(frozen=True)
class Case:
    """A call: `lengths` of its rows, columns of latents and rope keys, and how it is divided."""

    lengths: tuple[int, ...]
    latent: int = 128
    rope: int = 64
    heads: int = 64
    unit: str = "wgmma"
    splits: int = 2
    stages: int = 2
    page_size: int | None = None
    window: int | None = None
    slots: int = 192
    dtype: Any = jnp.bfloat16
    seed: int = 0

    @property
    def seen(self) -> np.ndarray:
        """(B, S), whether a slot is seen."""
        lengths, slot = np.array(self.lengths)[:, None], np.arange(self.slots)
        return (slot < lengths) & (slot >= lengths - (self.window or self.slots))

    def draw(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Queries and keys, each in its parts: (B, 1, N or S, L) and (B, 1, N or S, R)."""
        draws = np.random.default_rng(self.seed)
        shapes = [
            (len(self.lengths), 1, many, width)
            for many in (self.heads, self.slots)
            for width in (self.latent, self.rope)
        ]
        made = [np.asarray(draws.standard_normal(shape), self.dtype) for shape in shapes]
        return made[:2], made[2:]

    def inputs(self) -> Inputs:
        """What the kernel takes, NaN in all that is not seen and in pages of no row."""
        q, k = self.draw()
        unseen = ~self.seen[:, None, :, None]
        k = [np.where(unseen, np.asarray(np.nan, self.dtype), part) for part in k]
        table = None
        if self.page_size is not None:
            table, k = self._in_pages(k)
        lengths = jnp.array(self.lengths, jnp.int32)[:, None]
        return Inputs(*(tuple(map(jnp.asarray, parts)) for parts in (q, k)), None, lengths, table)

    def _in_pages(self, k: list[np.ndarray]) -> tuple[jax.Array, list[np.ndarray]]:
        many, size = self.slots // self.page_size, self.page_size
        pages = np.random.default_rng(self.seed).permutation(len(self.lengths) * many + 2)
        table = pages[: len(self.lengths) * many].reshape(-1, many)
        pools = []
        for part in k:
            pool = np.full((len(pages), 1, size, part.shape[-1]), np.nan, self.dtype)
            pool[table.reshape(-1)] = part.reshape(-1, 1, size, part.shape[-1])
            pools.append(pool)
        used = np.arange(many) < -(-np.array(self.lengths)[:, None] // size)
        return jnp.array(np.where(used, table, -1), jnp.int32), pools

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Outputs and LSEs in float64."""
        q, k = (np.concatenate(parts, axis=-1).astype(np.float64)[:, 0] for parts in self.draw())
        scores = np.where(self.seen[:, None], SCALE * np.einsum("bnc,bsc->bns", q, k), -np.inf)
        shift = np.maximum(scores.max(axis=-1), -1e300)
        weights = np.exp(scores - shift[..., None])
        total = weights.sum(axis=-1)
        with np.errstate(divide="ignore"):
            lse = shift + np.log(total)
        shares = weights / np.where(total > 0, total, 1)[..., None]
        return np.einsum("bns,bsc->bnc", shares, k[..., : self.latent]), lse


@pytest.fixture
def simulate(capfd) -> Callable[[Case], tuple[float, float]]:
    """Run a case; gives errors of outputs, relative to the largest, and of LSEs."""

    def run(case: Case) -> tuple[float, float]:
        plan = Plan(case.unit, ROWS, case.splits, case.stages)
        params = plgpu.InterpretGPUParams(detect_races=True)

        def call(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
            parts = latent.decode(inputs, plan, scale=SCALE, window=case.window, interpret=params)
            return merge(parts.out, parts.lse)

        out, lse = (np.asarray(x, np.float64)[:, 0] for x in jax.jit(call)(case.inputs()))
        # jax 0.11 prints what 0.12 raises.
        assert "RACE DETECTED" not in "".join(capfd.readouterr())
        right_out, right_lse = case.expected()
        empty = np.isneginf(right_lse)
        assert (np.isneginf(lse) == empty).all()
        error = np.abs(out - right_out).max() / max(np.abs(right_out).max(), 1e-30)
        return error, np.abs(np.where(empty, 0, lse) - np.where(empty, 0, right_lse)).max()

    return run


def is_right(case: Case, errors: tuple[float, float]) -> bool:
    """Whether errors are one rounding of the weights, and NaN is not."""
    return errors[0] <= float(jnp.finfo(case.dtype).eps) and errors[1] <= LSE_ACCURACY


CASES = {
    "short rows, empty splits": Case((0, 1, 63), splits=3),
    "rows about a tile": Case((64, 65, 192), unit="mma"),
    "no row lives": Case((0, 0), slots=64),
    "stages used again": Case((320,), splits=1, slots=320, unit="mma"),
    "two blocks of heads, all columns": Case((130,), heads=128, latent=512, unit="mma"),
    "pages of 16": Case((100, 192), page_size=16),
    "pages of 64": Case((100, 192), page_size=64, unit="mma"),
    "a window in pages": Case((190, 30), page_size=24, window=70, dtype=jnp.float16),
    "capacity of no whole tiles": Case((100, 40), slots=104, rope=32),
}


@pytest.mark.parametrize(
    "name",
    rest_slow(
        CASES,
        [
            *("short rows, empty splits", "stages used again", "pages of 64"),
            *(
                "two blocks of heads, all columns",
                "a window in pages",
                "capacity of no whole tiles",
            ),
        ],
    ),
)
def test_it_is_attention(name, simulate):
    assert is_right(CASES[name], simulate(CASES[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unit", "heads", "widths", "page_size", "window"),
    list(
        product(
            ("wgmma", "mma"),
            (64, 128),
            ((128, 64), (256, 16), (512, 64)),
            (None, 8, 16, 64, 128),
            (None, 100),
        )
    ),
)
def test_the_whole_product(unit, heads, widths, page_size, window, simulate):
    case = Case(
        (0, 1, 63, 64, 65, 130, 384),
        *widths,
        heads=heads,
        unit=unit,
        splits=4,
        page_size=page_size,
        window=window,
        slots=384,
    )
    assert is_right(case, simulate(case))


def arrives_early(name, half):
    """That half's warpgroup arrives before its products with values, and not again after them."""

    def plant(monkeypatch) -> None:
        is_named, add = known_barriers(monkeypatch, latent), latent._add_values

        def arrive(barrier):
            if not is_named(barrier, name):
                plgpu.barrier_arrive(barrier)

        def early(settings, scratch, span, i, which, sums):
            if which == half:
                barrier = getattr(scratch, name)
                stage = settings.stage(i)
                plgpu.barrier_arrive(barrier.at[stage] if name == "k_free" else barrier)
            return add(settings, scratch, span, i, which, sums)

        monkeypatch.setattr(latent, "plgpu", api(barrier_arrive=arrive))
        monkeypatch.setattr(latent, "_add_values", early)

    return plant


def without_last_wait(monkeypatch) -> None:
    """The leader does not wait with its last factor until the one before was read."""
    is_named, lead = known_barriers(monkeypatch, latent), latent._lead_tile
    inside: list[bool] = []

    def lead_tile(*args):
        inside.append(True)
        seen = lead(*args)
        inside.pop()
        return seen

    def wait(barrier):
        if inside or not is_named(barrier, "weights_free"):
            plgpu.barrier_wait(barrier)

    monkeypatch.setattr(latent, "_lead_tile", lead_tile)
    monkeypatch.setattr(latent, "plgpu", api(barrier_wait=wait))


def unfenced(*names):
    """These functions do not fence what they stored."""

    def without(function):
        def call(*args):
            with pytest.MonkeyPatch.context() as meanwhile:
                meanwhile.setattr(latent, "plgpu", api(commit_smem=lambda: None))
                return function(*args)

        return call

    def plant(monkeypatch) -> None:
        for name in names:
            monkeypatch.setattr(latent, name, without(getattr(latent, name)))

    return plant


def factor_afterwards(old):
    """The follower is told of weights and a factor before the factor is there."""

    def publish(scratch, factor):
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.weights_full)
        scratch.factor[...] = factor

    return publish


def one_slot_more(old):
    return lambda settings, span, *rest: old(settings, span._replace(n=span.n + 1), *rest)


def dead_values(old):
    """Values as they lie, dead ones among them."""
    return lambda settings, span, first, shape, axis: (
        old(settings, span, first, shape, axis) | (axis == 0)
    )


def halves_swapped(old):
    def add(settings, scratch, span, i, half, sums):
        swapped = scratch._replace(k=(scratch.k[1], scratch.k[0], scratch.k[2]))
        return old(settings, swapped, span, i, half, sums)

    return add


def without_rope(old):
    def products(settings, scratch, stage):
        return old(settings, scratch._replace(q=(*scratch.q[:2], scratch.q[0])), stage)

    return products


def binary_lse(old):
    def lead(*args):
        sums, lse = old(*args)
        return sums, lse * latent.LOG2_E

    return lead


def never_shrunk(old):
    return lambda per_head, like: old(jnp.ones_like(per_head), like)


# Four tiles in two stages, and an edge.
PLAIN = Case((250,), splits=1, slots=256, page_size=64)
STRONG = replace(PLAIN, unit="mma")
MUTANTS: dict[str, tuple[Case, Callable]] = {
    "queries read before they are there": (STRONG, without_wait(latent, "q_full", latent)),
    "keys read before they are there": (PLAIN, without_wait(latent, "k_full[1]", latent)),
    "rope keys read before they are there": (STRONG, without_wait(latent, "k_full[2]", latent)),
    "tiles overwritten unread": (PLAIN, without_wait(latent, "k_free", latent)),
    "weights read before they are there": (PLAIN, without_wait(latent, "weights_full", latent)),
    "weights overwritten unread": (PLAIN, without_wait(latent, "weights_free", latent)),
    "last factor written over one unread": (PLAIN, without_last_wait),
    "tiles released before they are read": (STRONG, arrives_early("k_free", latent.LEADER)),
    "weights released before they are read": (
        STRONG,
        arrives_early("weights_free", latent.FOLLOWER),
    ),
    "weights handed over before their factor": (
        PLAIN,
        changed(latent, "_publish", factor_afterwards),
    ),
    "reads not fenced from copies": (STRONG, unfenced("_publish", "_add_values")),
    "another page": (PLAIN, changed(copying, "_page", next_page)),
    "a slot more": (PLAIN, changed(latent, "_live", one_slot_more)),
    "dead values": (PLAIN, changed(latent, "_live", dead_values)),
    "halves of values swapped": (PLAIN, changed(latent, "_add_values", halves_swapped)),
    "rope keys times other queries": (PLAIN, changed(latent, "_products", without_rope)),
    "sums that never shrink": (PLAIN, changed(latent, "_along_columns", never_shrunk)),
    "lse in powers of 2": (PLAIN, changed(latent, "_lead_tiles", binary_lse)),
}


@pytest.mark.parametrize("case", [PLAIN, STRONG], ids=["wgmma", "mma"])
def test_without_a_planted_fault_it_is_attention(case, simulate):
    assert is_right(case, simulate(case))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_seen(name, simulate, monkeypatch):
    case, plant = MUTANTS[name]
    plant(monkeypatch)
    assert is_seen(case, simulate)


def is_seen(case: Case, simulate) -> bool:
    """Whether the simulation or its numbers say that something is wrong."""
    try:
        errors = simulate(case)
    except Exception as error:  # of a callback, whose own type is lost
        if raised_what_it_must(error):
            return True
        raise
    return not is_right(case, errors)


def traced(case: Case):
    """The kernel as it is compiled, not as it is interpreted."""
    plan = Plan("wgmma", ROWS, case.splits, case.stages)
    return jax.make_jaxpr(lambda inputs: latent.decode(inputs, plan, scale=SCALE))(case.inputs())


def test_what_is_stored_is_fenced_before_it_is_handed_on():
    assert handed_on_unfenced(traced(PLAIN).jaxpr) == (0, False)


@pytest.mark.parametrize("name", ["_publish", "_add_values"])
def test_a_missing_fence_is_seen(name, monkeypatch):
    unfenced(name)(monkeypatch)
    faults, _ = handed_on_unfenced(traced(PLAIN).jaxpr)
    assert faults


def shape(group=128, dims=(512, 64), batch=1, slots=8192, value_dim=0, stored=jnp.bfloat16):
    return Shape(batch, 1, group, dims, value_dim, slots, jnp.bfloat16, stored)


@pytest.mark.parametrize("dims", [(128, 64), (256, 32), (384, 64), (512, 16), (512, 64)])
def test_shared_memory_suffices(dims, monkeypatch):
    plan = make_latent_plan(shape(dims=dims), 132)
    assert plan is not None
    allocated: list[latent.Scratch] = []
    scratch = latent._scratch

    def watched(settings):
        allocated.append(scratch(settings))
        return allocated[-1]

    monkeypatch.setattr(latent, "_scratch", watched)
    traced(replace(PLAIN, latent=dims[0], rope=dims[1], stages=plan.stages))
    leaves = jax.tree.leaves(allocated[0]._asdict(), is_leaf=lambda x: hasattr(x, "num_arrivals"))
    arrays = [leaf for leaf in leaves if not hasattr(leaf, "num_arrivals")]
    barriers = [leaf for leaf in leaves if hasattr(leaf, "num_arrivals")]
    # Each array begins at a multiple of 1 KiB.
    taken = sum(-(-prod(a.shape) * jnp.dtype(a.dtype).itemsize // 1024) * 1024 for a in arrays)
    taken += 8 * sum(prod(barrier.num_barriers) for barrier in barriers)
    assert len(arrays) == 8
    assert taken + SYSTEM_BYTES <= SHARED_BYTES


@pytest.mark.parametrize(
    "other",
    [
        shape(group=16),
        shape(value_dim=512),
        shape(dims=(576, 64)),
        shape(dims=(192, 64)),
        shape(dims=(512, 128)),
        shape(stored=jnp.int8),
    ],
    ids=["few heads", "values of their own", "wide", "no whole halves", "one stage", "codes"],
)
def test_there_is_no_plan_for_what_it_does_not_serve(other):
    assert make_latent_plan(other, 132) is None


def test_a_long_row_fills_the_chip():
    """128 blocks of 64 heads and 32 tiles are one wave."""
    assert make_latent_plan(shape(slots=131072), 132) == Plan("wgmma", 64, 64, 2)
