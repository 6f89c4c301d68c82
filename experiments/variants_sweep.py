"""What variants of attention cost to decode on a CPU: the article's sweep, at smaller sizes.

The article (`docs/decode_time.md`) measured a kernel on a B300 over 8 query heads of 128: an eighth
of the bytes, by sharing KV heads, made it 2.4 times faster, which it puts down to more work for
each byte. Fewer bytes with as much work for each, by a window, smaller numbers or shared layers,
should then gain all that they save. Any machine can test that. Needs no model.

    python experiments/variants_sweep.py [--quick] [--resume] [--out DIR]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import ROOT, Setup
from jax import Array
from study import Study
from variants_page import draw, notes, page

from kvjax.bench import result
from kvjax.bench.bandwidth import Bandwidth, probes
from kvjax.bench.cached_attention import CacheCase, Steps
from kvjax.bench.case import Case, Inputs
from kvjax.bench.timing import Sampler, interleave, time_calls
from kvjax.ops import decode_attention

NAME, TITLE = "variants_sweep", "Variants of attention: decode on a CPU"
FIGURES = ROOT / "tests" / "sizing" / "seed_figures.json"
QUERY_HEADS, WIDTH = 8, 128
# The largest difference of two contenders' outputs, as a share of the largest output.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Sizes:
    """How large a run is.

    Attributes:
      rounds: samples of each contender.
      array_bytes: of the arrays that the memory's speed is measured on.
      shapes: (B, live tokens) over which KV heads vary.
      dims: head dims, with one KV head.
      batches, lengths: B at the first shape's length, with all KV heads and with one; tokens of
        one row.
    """

    rounds: int = 7
    array_bytes: int = 2**28
    shapes: tuple[tuple[int, int], ...] = ((4, 8192), (1, 32768))
    dims: tuple[int, ...] = (64, 96, 128, 192, 256)
    batches: tuple[int, ...] = (1, 2, 4, 8)
    lengths: tuple[int, ...] = (2048, 8192, 32768, 131072)


QUICK = Sizes(3, 2**20, ((2, 256), (1, 512)), (64, 96), (1, 2), (128, 256))

ABOUT = (
    "One decode step of attention over f32 caches of 8 query heads, all slots live. Every table "
    "is one run of interleaved rounds, in which the machine's memory is measured, too: a floor is "
    "the bytes of the live cache at the fastest of a copy, an update in place and a read. "
    "Published figures are the article's, of its kernel on a B300 with 8 query heads of 128 in "
    "bf16. **GPU figures are pending**: this library's kernels have been compiled and simulated, "
    "and not yet been run on a GPU; `scripts/bench_gpu.py` measures the same there "
    "(`docs/gpu_benchmark.md`)."
)


def case(batch: int, length: int, kv_heads: int, width: int = WIDTH) -> Case:
    return Case(batch, QUERY_HEADS, kv_heads, width, length, length, "f32")


def head_major(q: Array, k: Array, v: Array) -> Array:
    """All scores at once, over caches (B, K, S, H)."""
    return _at_once(q, k, v, "bksh")


def token_major(q: Array, k: Array, v: Array) -> Array:
    """The same over caches (B, S, K, H)."""
    return _at_once(q, k, v, "bskh")


def _at_once(q: Array, k: Array, v: Array, axes: str) -> Array:
    """q (B, N, H) over caches with these axes."""
    batch, heads, dim = q.shape
    grouped = q.reshape(batch, k.shape[axes.index("k")], -1, dim) * dim**-0.5
    weights = jax.nn.softmax(jnp.einsum(f"bkgh,{axes}->bkgs", grouped, k))
    return jnp.einsum(f"bkgs,{axes}->bkgh", weights, v).reshape(batch, heads, -1)


def contenders(one: Case) -> dict[str, Callable[[], Array]]:
    """A step of each, over the same numbers."""
    inputs = Inputs(one)
    q, k, v = inputs.q, inputs.k, inputs.v
    ours, first, second = (jax.jit(f) for f in (decode_attention, head_major, token_major))
    turned = inputs.token_major
    return {
        "kvjax": lambda: ours(q, k, v, inputs.lengths),
        "head-major": lambda: first(q, k, v),
        "token-major": lambda: second(q, *turned),
    }


def measure(setup: Setup) -> dict[str, Any]:
    """All tables, each a run of its own."""
    sizes = QUICK if setup.quick else Sizes()
    batch, length = sizes.shapes[0]
    tables = {
        f"KV heads, {rows} x {tokens:,} tokens": (
            [case(rows, tokens, heads) for heads in (8, 4, 2, 1)],
            ("kvjax", "head-major", "token-major"),
        )
        for rows, tokens in sizes.shapes
    }
    alone = ("kvjax",)
    tables["Head dims, 1 KV head"] = [case(batch, length, 1, width) for width in sizes.dims], alone
    for heads in (8, 1):
        cases = [case(rows, length, heads) for rows in sizes.batches]
        tables[f"Batch, {heads} KV head{'s' * (heads > 1)}"] = cases, alone
    tables["Tokens of one row, 2 KV heads"] = (
        [case(1, tokens, 2) for tokens in sizes.lengths],
        alone,
    )
    return {
        "sizes": asdict(sizes),
        "published": published(),
        "tables": [
            setup.measured(name, timed, cases, names, sizes)
            for name, (cases, names) in tables.items()
        ],
        "fewer_bytes": setup.measured("fewer bytes", fewer_bytes, sizes),
    }


def published() -> dict[str, float]:
    """The article's figures by id."""
    wanted = ("sweep.", "batching.")
    rows = json.loads(FIGURES.read_text("utf-8"))
    return {row["id"]: row["expected"] for row in rows if row["id"].startswith(wanted)}


def timed(cases: Sequence[Case], names: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """Rows of these contenders at each case, from one run.

    Raises:
      RuntimeError: two contenders of a case do not compute the same.
    """
    samplers: dict[Any, Sampler] = {}
    for one in cases:
        steps = {name: step for name, step in contenders(one).items() if name in names}
        outputs = [np.asarray(step()) for step in steps.values()]
        for name, output in zip(steps, outputs, strict=True):
            # Written so that NaN fails.
            if not np.abs(output - outputs[0]).max() <= TOLERANCE * np.abs(outputs[0]).max():
                raise RuntimeError(f"{name} and {next(iter(steps))} differ at {one}")
        samplers |= {(one, name): partial(time_calls, step) for name, step in steps.items()}
    moves = probes(sizes.array_bytes)
    timings = interleave({**samplers, **moves}, sizes.rounds)
    bandwidth = Bandwidth.of(moves, timings)
    return {
        "bandwidth": bandwidth.figures(),
        "rows": [
            result.row(
                name, asdict(one), one.bytes_per_step, one.flop_per_step, timings[key], bandwidth
            )
            for key in samplers
            for one, name in [key]
        ],
    }


def fewer_bytes(sizes: Sizes) -> dict[str, Any]:
    """Steps over the library's caches that read fewer bytes, each in its way.

    The newest token is written, too. Two layers that share a cache take two steps over it, and
    two that do not take one over each of two.
    """
    batch, length = sizes.shapes[0]
    base = CacheCase(batch, QUERY_HEADS, QUERY_HEADS, WIDTH, length, codec="f32")
    ways = {"MHA, f32": base}
    for times in (2, 4, 8):
        heads = QUERY_HEADS // times
        ways[f"{heads} KV head{'s' * (heads > 1)}"] = replace(base, kv_heads=heads)
        ways[f"window of {length // times:,}"] = replace(base, window=length // times)
    ways |= {codec: replace(base, codec=codec) for codec in ("bf16", "fp8_e4m3", "int8", "int4")}
    steps = {by: Steps(one) for by, one in ways.items()}
    first, second = steps["MHA, f32"], Steps(base, seed=1)
    layers: dict[str, Sampler] = {
        "two layers, two caches": _layers(first, second),
        "two layers, one cache": _layers(first, first),
    }
    moves = probes(sizes.array_bytes)
    timings = interleave({**steps, **layers, **moves}, sizes.rounds)
    bandwidth = Bandwidth.of(moves, timings)
    rows = []
    for by, one in ways.items():
        nbytes = one.cache_bytes().read_per_step
        about = {"by": by, **asdict(one)}
        flop = one.batch * one.layer.attention_flop(one.length)  # in a window, the window's
        rows.append(result.row("kvjax", about, nbytes, flop, timings[by], bandwidth))
    return {
        "bandwidth": bandwidth.figures(),
        "rows": rows,
        "layers": {by: timings[by].median for by in layers},
    }


def _layers(first: Steps, second: Steps) -> Sampler:
    """Steps of two layers, one after the other."""
    return partial(time_calls, lambda: (first.step(), second.step()))


STUDY = Study(NAME, TITLE, ABOUT, measure, lambda figures: [*page(figures), notes(figures)], draw)
main = STUDY.main

if __name__ == "__main__":
    main()
