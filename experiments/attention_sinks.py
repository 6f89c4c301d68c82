"""Perplexity of a long stream in a small cache, with and without its first tokens.

Tables 1 and 2 of StreamingLLM (Xiao et al. 2024, arXiv:2309.17453): a window alone breaks as soon
as the first tokens leave it; four of them, kept beside a window, bring the perplexity back.

    python experiments/attention_sinks.py [--model DIR] [--quick] [--resume] [--out DIR]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from common import Experiment, Setup
from matplotlib.figure import Figure

from kvjax.bench.report import markdown_table
from kvjax.cache import SinkRing
from kvjax.engine import score

SINKS = (0, 1, 2, 4, 8)
SLOTS = (256, 512, 1024)
STREAM = 8192
CHUNK = 256
PARTS = 4  # of what is scored, for the course of the perplexity

# Perplexity by sink tokens. Table 2: 400K tokens of PG19; Table 1: its first book, 65K tokens.
PUBLISHED: dict[str, Any] = {
    "source": "arXiv:2309.17453, Tables 1 and 2",
    "table_2": {
        "Falcon-7B": [17.90, 12.12, 12.12, 12.12, 12.12],
        "MPT-7B": [460.29, 14.99, 15.00, 14.99, 14.98],
        "Pythia-12B": [21.62, 11.95, 12.09, 12.09, 12.02],
        "Llama-2-7B": [3359.95, 11.88, 10.51, 9.59, 9.54],
    },
    "table_1": {"0+1024": 5158.07, "4+1020": 5.40, "recomputed": 5.43},
}

ABOUT = (
    "One continuous text is read in chunks, which is the same function as token by token: every "
    "token sees the first tokens that are kept and the window before it. Cached keys keep the "
    "rotation of their place in the text, where the paper gives them that of their place in the "
    "cache; rows marked *re-indexed* do as the paper does."
)


def measure(setup: Setup) -> dict[str, Any]:
    """Perplexity past the largest cache, of every layout and of full attention."""
    slots, stream = ((8, 16), 128) if setup.quick else (SLOTS, STREAM)
    sinks = (0, 4) if setup.quick else SINKS
    chunk = 16 if setup.quick else CHUNK
    text = setup.text[None, : stream + 1]
    rings = [SinkRing(kept, size - kept) for size in slots for kept in sinks]
    rings += [SinkRing(4, size - 4, reindexed=True) for size in slots]
    rows = [
        setup.measured(_name(ring), _row, setup, text, ring, chunk, max(slots))
        for ring in (None, *rings)
    ]
    return {"tokens": stream, "scored_from": max(slots), "chunk": chunk, "rows": rows}


def _row(
    setup: Setup, text: np.ndarray, ring: SinkRing | None, chunk: int, first: int
) -> dict[str, Any]:
    cache = setup.model.init_cache(1, text.shape[1], ring or "dense", "f32")
    nbytes = cache.nbytes
    scores, _ = score(setup.model, text, cache, chunk=chunk)
    nll = scores.nll[0, first:]
    return {
        "sinks": None if ring is None else ring.sink_tokens,
        "window": None if ring is None else ring.window,
        "reindexed": ring is not None and ring.reindexed,
        "perplexity": float(np.exp(nll.mean())),
        "perplexity_by_part": [float(np.exp(part.mean())) for part in np.array_split(nll, PARTS)],
        "cache_bytes": nbytes,
    }


def _name(ring: SinkRing | None) -> str:
    if ring is None:
        return "full attention"
    return f"{ring.sink_tokens}+{ring.window}" + " re-indexed" * ring.reindexed


def page(figures: Mapping[str, Any]) -> list[str]:
    """Table of ours, what it says, and theirs."""
    rows = figures["rows"]
    full, *rings = rows
    ours = [
        [row["name"], f"{row['cache_bytes'] / 2**20:.1f}", f"{row['perplexity']:.2f}"]
        + [f"{part:.2f}" for part in row["perplexity_by_part"]]
        for row in rows
    ]
    parts = [f"part {i}" for i in range(1, PARTS + 1)]
    published = [
        [model, *(f"{figure:.2f}" for figure in by_sinks)]
        for model, by_sinks in PUBLISHED["table_2"].items()
    ]
    first = PUBLISHED["table_1"]
    return [
        f"Perplexity of tokens {figures['scored_from']:,} to {figures['tokens']:,}, all of them "
        f"and in {PARTS} parts; sinks+window in slots a layer, MiB of the cache in f32:",
        markdown_table(["cache", "MiB", "perplexity", *parts], ours),
        _verdict(full, rings),
        f"Published ({PUBLISHED['source']}), by sink tokens, 400K tokens:",
        markdown_table(["model", *map(str, SINKS)], published),
        f"And on the first book of PG19, Llama-2-13B: {first['0+1024']} for 0+1024, "
        f"{first['4+1020']:.2f} for 4+1020, {first['recomputed']} for a window computed anew for "
        f"each token.",
    ]


def _verdict(full: Mapping[str, Any], rings: list[Mapping[str, Any]]) -> str:
    """What the largest caches say of the published effect."""
    size = max(row["sinks"] + row["window"] for row in rings)
    by_sinks = {
        row["sinks"]: row["perplexity"]
        for row in rings
        if row["sinks"] + row["window"] == size and not row["reindexed"]
    }
    alone, four = by_sinks[0], by_sinks[4]
    collapse, rest = alone / full["perplexity"], four / full["perplexity"]
    return (
        f"In {size:,} slots a window alone has {collapse:.2f} times the perplexity of full "
        f"attention, and with four first tokens {rest:.2f} times. Published of Llama-2-13B: "
        f"{5158.07 / 5.43:.0f} and {5.40 / 5.43:.2f} times that of a window computed anew."
    )


def draw(figures: Mapping[str, Any]) -> Figure:
    """Perplexity over sink tokens, a line for each number of slots."""
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    full, *rings = figures["rows"]
    sizes = sorted({row["sinks"] + row["window"] for row in rings})
    for i, size in enumerate(sizes):
        same = [row for row in rings if row["sinks"] + row["window"] == size]
        line = [(row["sinks"], row["perplexity"]) for row in same if not row["reindexed"]]
        axes.plot(*zip(*line, strict=True), "o-", color=f"C{i}", label=f"{size} slots")
        again = [(row["sinks"], row["perplexity"]) for row in same if row["reindexed"]]
        if again:
            says = f"{size} slots, re-indexed"
            axes.plot(*zip(*again, strict=True), "x", color=f"C{i}", markersize=9, label=says)
    axes.axhline(full["perplexity"], color="k", linestyle="--", label="full attention")
    axes.set(xlabel="first tokens kept", ylabel="perplexity", yscale="log")
    axes.set_xticks(sorted({row["sinks"] for row in rings}))
    axes.legend(fontsize="small")
    return figure


EXPERIMENT = Experiment(
    "attention_sinks", "Attention sinks in a stream", ABOUT, measure, page, draw
)

if __name__ == "__main__":
    EXPERIMENT.main()
