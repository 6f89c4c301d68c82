"""Bytes against divergence, over codecs, layouts, eviction, and two of them together.

Where would a byte of the cache be saved best? All points are measured on the same text in the same
way, that of codec_divergence.py, whose results are taken over where they lie in the same directory.
Beside them stand the claims of KIVI (arXiv:2402.02750), StreamingLLM (arXiv:2309.17453) and TOVA
(arXiv:2401.06104), which are of other models and tasks.

    python experiments/pareto.py [--model DIR] [--quick] [--resume] [--out DIR]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import codec_divergence
from common import QUICK, Decoding, Experiment, Setup
from matplotlib.figure import Figure

from kvjax.bench.report import markdown_table
from kvjax.cache import Cache, SinkRing
from kvjax.engine import Scores, compress
from kvjax.evict import POLICIES

KEPT = ("cache_bytes_per_row", "kl", "kl_standard_error", "loss")


@dataclass(frozen=True)
class Choice:
    """What is measured beside the codecs: rings and policies, in each size and codec."""

    slots: tuple[int, ...] = (512, 256, 128)
    codecs: tuple[str, ...] = ("bf16", "int8")
    policies: tuple[str, ...] = ("snapkv", "keydiff")


SMALL = Choice(slots=(40,), codecs=("int8",), policies=("keydiff",))

PUBLISHED = [
    ["KIVI, 2 bits", "2.6 times less peak memory, weights included; LongBench 44.52 to 44.27"],
    ["StreamingLLM, 4+1020", "perplexity 5.40, and 5.43 with a window computed anew"],
    ["TOVA", "near the full model with 1/8 of the cache"],
]

ABOUT = (
    "KL is that of the f32 cache's next-token distribution from the tested one's, over tokens "
    "decoded one at a time after a prefill; a ring is prefilled through itself, and policies evict "
    "once, between prefill and decoding. Bytes are those of all arrays of the cache as it was at "
    "the end, tables and room for the decoded tokens included, per row of text."
)


@dataclass
class Run:
    """The text, and the full caches that policies evict from, made when the first needs them."""

    setup: Setup
    decoding: Decoding
    _full: dict[str, Cache] = field(default_factory=dict)

    @cached_property
    def exact(self) -> Scores:
        """Through the f32 cache."""
        return self.decoding.exact(self.setup)

    def full(self, codec: str) -> Cache:
        """The prefilled cache in a codec; the one before it is dropped."""
        if codec not in self._full:
            how, model = self.decoding, self.setup.model
            empty = model.init_cache(how.rows, how.prefill, "dense", codec)
            self._full = {codec: how.filled(self.setup, empty)}
        return self._full[codec]


def measure(setup: Setup) -> dict[str, Any]:
    """Points of four kinds: codecs, rings, policies, and the latter two with a smaller codec."""
    decoding, choice = (QUICK, SMALL) if setup.quick else (Decoding(), Choice())
    run = Run(setup, decoding)
    points = [
        {"kind": "codec", **{name: row[name] for name in ("name", *KEPT)}}
        for row in _codecs(setup, decoding)
    ]
    for codec in choice.codecs:
        for slots in choice.slots:
            name = f"sinks 4+{slots - 4}, {codec}"
            points.append(setup.measured(name, _ring, run, slots, codec))
        for policy in choice.policies:
            for slots in choice.slots:
                name = f"{policy} {slots}, {codec}"
                points.append(setup.measured(name, _evicted, run, policy, slots, codec))
    return {
        "decoding": asdict(decoding),
        "tokens": decoding.rows * decoding.steps,
        "points": points,
        "front": [one["name"] for one in points if not any(_beats(two, one) for two in points)],
        "eviction": _of_eviction(setup),
    }


def _codecs(setup: Setup, decoding: Decoding) -> list[dict[str, Any]]:
    """Rows of codec_divergence.py: as it wrote them, or measured here."""
    found = setup.result("codec_divergence")
    if found is not None and found["decoding"] == asdict(decoding):
        return found["rows"]
    return codec_divergence.measure(setup)["rows"]


def _ring(run: Run, slots: int, codec: str) -> dict[str, Any]:
    how, model = run.decoding, run.setup.model
    empty = model.init_cache(how.rows, how.capacity, SinkRing(4, slots - 4), codec)
    scores, after = how.decoded(run.setup, how.filled(run.setup, empty), run.exact)
    kind = "ring" if codec == "bf16" else "ring and codec"
    return {"kind": kind, **how.figures(scores, run.exact, after)}


def _evicted(run: Run, policy: str, slots: int, codec: str) -> dict[str, Any]:
    how, model = run.decoding, run.setup.model
    text = how.text(run.setup)[:, : how.prefill]
    full = run.full(codec)
    kept = compress(model, full, text, POLICIES[policy], slots, room=how.steps)
    scores, after = how.decoded(run.setup, kept, run.exact)
    kind = "eviction" if codec == "bf16" else "eviction and codec"
    return {"kind": kind, **how.figures(scores, run.exact, after)}


def _of_eviction(setup: Setup) -> list[dict[str, Any]]:
    """What eviction.py found of policies on other stretches of the text, if it has run."""
    found = setup.result("eviction")
    if found is None:
        return []
    return [
        {
            "name": f"{row['policy']}, {row['codec']}",
            "cache_bytes_per_row": row["bytes"] / found["rows"],
            "kl": row["kl"],
        }
        for row in found["losses"]
        if "kl" in row
    ]


def _beats(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether one is as good in bytes and KL, and better in either."""
    pairs = [(one[name], other[name]) for name in ("cache_bytes_per_row", "kl")]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def page(figures: Mapping[str, Any]) -> list[str]:
    """All points in order of bytes, the front, that of eviction.py, and what was claimed."""
    full = next(row for row in figures["points"] if row["name"] == "bf16")
    rows = [
        [
            f"**{row['name']}**" if row["name"] in figures["front"] else row["name"],
            row["kind"],
            f"{row['cache_bytes_per_row'] / 2**20:.2f}",
            f"{full['cache_bytes_per_row'] / row['cache_bytes_per_row']:.2f}",
            f"{row['kl']:.2e} ± {row['kl_standard_error']:.0e}",
            f"{row['loss']:.4f}",
        ]
        for row in sorted(figures["points"], key=lambda row: -row["cache_bytes_per_row"])
    ]
    how = figures["decoding"]
    parts = [
        f"{how['rows']} rows of {how['prefill']:,} tokens and {how['steps']} decoded; in bold what "
        f"no other point beats in both bytes and KL.",
        markdown_table(["cache", "kind", "MiB a row", "bf16 / this", "KL, nats", "loss"], rows),
        _verdict(figures),
    ]
    others = figures["eviction"]
    if others:
        front = [row for row in others if not any(_beats(other, row) for other in others)]
        parts += [
            "Of all policies that eviction.py measured on longer prompts, whose KL is from the "
            "full bf16 cache, nothing beats:",
            markdown_table(
                ["policy", "MiB a row", "KL, nats"],
                [
                    [row["name"], f"{row['cache_bytes_per_row'] / 2**20:.2f}", f"{row['kl']:.2e}"]
                    for row in sorted(front, key=lambda row: -row["cache_bytes_per_row"])
                ],
            ),
        ]
    claims = "Published, of other models and tasks (2402.02750, 2309.17453, 2401.06104):"
    return [*parts, claims, markdown_table(["cache", "claim"], PUBLISHED)]


def _verdict(figures: Mapping[str, Any]) -> str:
    """Which kinds of points make the front, from the largest to the smallest."""
    points = [row for row in figures["points"] if row["name"] in figures["front"]]
    points.sort(key=lambda row: -row["cache_bytes_per_row"])
    kinds = ", ".join(f"{row['name']} ({row['kind']})" for row in points)
    return f"The front, from the most bytes to the fewest: {kinds}."


def draw(figures: Mapping[str, Any]) -> Figure:
    """KL over bytes; the front as a line."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    points = [row for row in figures["points"] if row["kl"] > 0]
    for i, kind in enumerate(dict.fromkeys(row["kind"] for row in points)):
        same = [row for row in points if row["kind"] == kind]
        axes.plot(*_at(same), "o", color=f"C{i}", label=kind)
    front = [row for row in points if row["name"] in figures["front"]]
    axes.plot(*_at(sorted(front, key=lambda row: row["cache_bytes_per_row"])), "k-", lw=0.8)
    for row in front:
        at = row["cache_bytes_per_row"] / 2**20, row["kl"]
        axes.annotate(row["name"], at, xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set(xlabel="MiB a row", ylabel="KL from f32, nats", xscale="log", yscale="log")
    axes.margins(x=0.15)
    axes.legend(fontsize="small")
    return figure


def _at(rows: list[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    return [row["cache_bytes_per_row"] / 2**20 for row in rows], [row["kl"] for row in rows]


EXPERIMENT = Experiment("pareto", "Bytes against divergence", ABOUT, measure, page, draw)

if __name__ == "__main__":
    EXPERIMENT.main()
