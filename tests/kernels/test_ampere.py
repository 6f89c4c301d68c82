"""The decode kernel with `cp.async`, interpreted with races looked for, against float64.

Copies are simulated as what they are: asynchronous, ended in order, and waited for by count.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from quick import rest_slow

from kernels.planting import raised_what_it_must
from kvjax.kernels.mosaic_gpu import ampere
from kvjax.kernels.mosaic_gpu.plan import SYSTEM_BYTES, Plan, Shape, make_plan, shared_bytes
from kvjax.kernels.mosaic_gpu.settings import Inputs
from kvjax.ops import merge

# Of float32 sums, in natural logarithms.
LSE_ACCURACY = 2e-5


@dataclass(frozen=True)
class Case:
    """A call with `lengths` (B,), or (B, K) for each KV head, and `dims` (H, HV)."""

    lengths: tuple
    slots: int = 256
    kv_heads: int = 1
    group: int = 4
    dims: tuple[int, int] = (64, 64)
    page_size: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    query: str = "bfloat16"
    stored: str = "bfloat16"
    scales: str | None = None
    splits: int = 2
    stages: int = 2

    @property
    def live(self) -> np.ndarray:
        """(B, K)"""
        lengths = np.asarray(self.lengths, np.int32).reshape(len(self.lengths), -1)
        return np.broadcast_to(lengths, (len(lengths), self.kv_heads))

    @property
    def seen(self) -> np.ndarray:
        """Bool (B, K, S)."""
        slot, n = np.arange(self.slots), self.live[..., None]
        return (slot < n) & (slot >= n - (self.window or self.slots))


class Drawn(NamedTuple):
    """q (B, K, G, H); k (B, K, S, H) and v (B, K, S, HV) as stored; scales (K,), (B, K, S)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_scale: np.ndarray | None
    v_scale: np.ndarray | None


def draw(case: Case) -> Drawn:
    rng = np.random.default_rng(0)
    rows = (len(case.lengths), case.kv_heads)
    q = rng.normal(size=(*rows, case.group, case.dims[0]))
    k, v = (rng.normal(size=(*rows, case.slots, dim)) for dim in case.dims)
    if case.stored == "int8":
        k, v = (np.clip(np.round(40 * x), -127, 127) for x in (k, v))
    k_scale = v_scale = None
    if case.scales == "head":
        k_scale = np.linspace(0.5, 1, case.kv_heads, dtype=np.float32)
    if case.scales == "token":
        k_scale, v_scale = (0.02 * np.exp(rng.normal(size=(2, *rows, case.slots)))).astype(
            np.float32
        )
    k, v = (x.astype(jnp.dtype(case.stored)) for x in (k, v))
    return Drawn(q.astype(jnp.dtype(case.query)), k, v, k_scale, v_scale)


def expected(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """out (B, K, G, HV) and lse (B, K, G) in float64."""
    drawn = draw(case)
    q, k, v = (x.astype(np.float64) for x in drawn[:3])
    if case.scales == "head":
        k *= drawn.k_scale[:, None, None]
    if case.scales == "token":
        k *= drawn.k_scale[..., None]
        v *= drawn.v_scale[..., None]
    scores = np.einsum("bkgh,bksh->bkgs", q, k) * case.dims[0] ** -0.5
    if case.soft_cap is not None:
        scores = case.soft_cap * np.tanh(scores / case.soft_cap)
    weights = np.where(case.seen[:, :, None], np.exp(scores), 0)
    total = weights.sum(-1)
    out = np.einsum("bkgs,bksh->bkgh", weights, v) / np.where(total > 0, total, 1)[..., None]
    with np.errstate(divide="ignore"):
        return out, np.log(total)


def cached(case: Case, x: np.ndarray, pages: np.ndarray | None) -> np.ndarray:
    """Rows (B, K, S, ...), or as pages (num_pages, K, P, ...), with NaN in all that is not seen."""
    nothing = np.asarray(99 if x.dtype == np.int8 else np.nan).astype(x.dtype)
    seen = case.seen.reshape(case.seen.shape + (1,) * (x.ndim - 3))
    x = np.where(seen, x, nothing)
    if pages is None:
        return x
    split = x.reshape(*x.shape[:2], -1, case.page_size, *x.shape[3:])
    pool = np.full((pages.size + 3, x.shape[1], *split.shape[3:]), nothing)
    pool[pages] = np.moveaxis(split, 2, 1)
    return pool


def attend(case: Case) -> tuple[jax.Array, jax.Array]:
    """As `expected`, by the kernel."""
    drawn, pages, table = draw(case), None, None
    if case.page_size is not None:
        shape = len(case.lengths), case.slots // case.page_size
        pages = np.random.default_rng(1).permutation(np.prod(shape) + 3)[: np.prod(shape)]
        pages = pages.reshape(shape).astype(np.int32)
        used = -(-case.live.max(1, keepdims=True) // case.page_size)
        table = np.where(np.arange(shape[1]) < used, pages, -1)
    heads = -(-case.group // 8) * 8
    by_token = [cached(case, x, pages) for x in drawn[3:] if case.scales == "token"] or [None, None]
    inputs = Inputs(
        q=(np.pad(drawn.q, ((0, 0), (0, 0), (0, heads - case.group), (0, 0))),),
        k=(cached(case, drawn.k, pages),),
        v=cached(case, drawn.v, pages),
        lengths=case.live,
        page_table=table,
        key_factor=drawn.k_scale if case.scales == "head" else None,
        k_scale=by_token[0],
        v_scale=by_token[1],
    )
    parts = ampere.decode(
        jax.tree.map(jnp.asarray, inputs),
        Plan("mma", heads, case.splits, case.stages),
        scale=case.dims[0] ** -0.5,
        soft_cap=case.soft_cap,
        window=case.window,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    out, lse = merge(parts.out, parts.lse)
    return out[:, :, : case.group], lse[:, :, : case.group]


def agrees(case: Case) -> bool:
    """Whether output and LSE are right, but for a rounding of weights to the queries' dtype."""
    (out, lse), (right, right_lse) = attend(case), expected(case)
    bound = float(jnp.finfo(case.query).eps) * max(np.abs(right).max(), 1e-30)
    return np.allclose(out, right, rtol=0, atol=bound) and np.allclose(
        lse, right_lse, rtol=0, atol=LSE_ACCURACY
    )


CODES = Case((190, 70), query="float16", stored="int8", scales="token")
CASES = {
    "rows": Case((200, 65, 0), kv_heads=2, group=8, dims=(128, 128)),
    "each head has its own": Case(((256, 1), (0, 64)), kv_heads=2, dims=(80, 80)),
    "more tiles than stages": Case((440,), 448, dims=(96, 96), splits=1, stages=3),
    "window, capacity of no whole tiles": Case((200, 130), 200, window=70),
    "capacity of no whole tiles": Case((200, 199), 200, splits=1),
    "cap": Case((190,), group=11, dims=(192, 128), soft_cap=5.0),
    "pages of 16": Case((250, 70), page_size=16, splits=1),
    "pages of 24": Case((330,), 384, page_size=24, window=100, dims=(128, 128)),
    "int8 in pages of 64": replace(CODES, page_size=64, window=65, soft_cap=4.0),
    "fp8": replace(CODES, stored="float8_e4m3fn", scales="head", kv_heads=2),
}


@pytest.fixture
def serves(capfd):
    """Whether the kernel's numbers are right for a case, and nothing races."""

    def right(case: Case) -> bool:
        try:
            found = agrees(case)
        except Exception as error:  # of a callback, whose own type is lost
            if not raised_what_it_must(error):
                raise
            found = False
        # jax 0.11 prints what 0.12 raises.
        return found and "RACE DETECTED" not in "".join(capfd.readouterr())

    return right


@pytest.mark.parametrize(
    "name",
    rest_slow(
        CASES,
        [
            *("each head has its own", "more tiles than stages", "cap", "pages of 24"),
            *("int8 in pages of 64", "fp8"),
        ],
    ),
)
def test_it_is_attention(name, serves):
    assert serves(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize(("splits", "stages", "window"), [(1, 1, 70), (1, 3, None), (3, 2, 100)])
@pytest.mark.parametrize("group", [1, 19])
@pytest.mark.parametrize("page_size", [None, 8, 32, 128])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_it_is_attention_in_every_shape(dims, page_size, group, splits, stages, window, serves):
    if None in (ampere.copied_width(page_size or 64, dim, jnp.bfloat16) for dim in dims):
        pytest.skip("pages are too small for these widths")
    case = Case((500, 70), 512, 1, group, dims, page_size, window, splits=splits, stages=stages)
    assert serves(case)


def skipping(kind):
    """There is no wait before keys (as many cases as stages) or values (1 more) are multiplied."""

    def plant(ring):
        wait = ring._wait

        def some(self, later, ahead):
            if len(ahead) - self.settings.plan.stages != kind:
                wait(self, later, ahead)

        return {"_wait": some}

    return plant


def one_less(kind):
    """One copy too few is waited for before keys, or values, are multiplied."""

    def plant(ring):
        wait = ring._wait

        def less(self, later, ahead):
            here = len(ahead) - self.settings.plan.stages == kind
            wait(self, later, [n + here for n in ahead])

        return {"_wait": less}

    return plant


def values_with_keys(ring):
    keys, values = ring._copy_keys, ring._copy_values

    def both(self, stage, places):
        keys(self, stage, places)
        values(self, stage, places)

    return {"_copy_keys": both, "_copy_values": lambda self, stage, places: None}


def shown_again(ring):
    return {"_seen_of": lambda self, i: self.span}


def next_scales(ring):
    scales = ring._token_scales
    return {"_token_scales": lambda self, i: scales(self, i + 1)}


def next_tile(ring):
    places = ring._places
    return {"_places": lambda self, i: places(self, i + 1)}


FAULTS = {
    "keys are not waited for": ("more tiles than stages", skipping(0)),
    "values are not waited for": ("more tiles than stages", skipping(1)),
    "a copy of keys too few is waited for": ("pages of 16", one_less(0)),
    "a copy of values too few is waited for": ("pages of 16", one_less(1)),
    "values are replaced unread": ("more tiles than stages", values_with_keys),
    "slots count twice": ("capacity of no whole tiles", shown_again),
    "scales of the next tile": ("int8 in pages of 64", next_scales),
    "another tile": ("pages of 16", next_tile),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, serves, monkeypatch):
    name, plant = FAULTS[fault]
    for method, changed in plant(ampere._Ring).items():
        monkeypatch.setattr(ampere._Ring, method, changed)
    assert not serves(CASES[name])


@pytest.mark.parametrize("capability", ampere.LIMITS)
@pytest.mark.parametrize("stored", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("group", [1, 8, 16, 33, 64, 71, 128])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_shared_memory_suffices(dims, group, stored, capability):
    limits = ampere.LIMITS[capability]
    shape = Shape(4, 8, group, dims[:1], dims[1], 8192, jnp.float16, stored)
    plan = make_plan(shape, "mma", 108, limits)
    fixed, stage = shared_bytes(shape, "mma", plan.heads)
    if capability != (8, 0) and (dims, stored) == ((256, 256), jnp.int8):
        assert plan.stages == 0  # widened codes alone take 64 KiB
        return
    assert plan.stages >= (2 if capability == (8, 0) or dims[0] < 192 else 1)
    assert plan.residents * (fixed + plan.stages * stage + SYSTEM_BYTES) <= limits.shared_bytes


@pytest.mark.parametrize(
    ("rows", "columns", "start", "width"),
    [
        (64, 128, 0, 64),  # 8 x 2 tiles of 8 x 64
        (64, 80, 0, 16),  # 160 bytes are swizzles of 32
        (64, 64, 32, 32),  # a tile may not begin within another
        (16, 64, 0, 32),  # 2 x 1 tiles of 8 x 64 would leave two warps idle
        (8, 128, 0, 32),
        (8, 64, 0, None),  # 8 bytes a thread
        (16, 96, 0, None),  # 1.5 times 16 bytes a thread
        (8, 96, 0, None),  # 1 x 6 tiles at most
        (16, 80, 0, None),
    ],
)
def test_four_warps_copy_as_many_tiles_each(rows, columns, start, width):
    assert ampere.copied_width(rows, columns, jnp.bfloat16, start) == width
