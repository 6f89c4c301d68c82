"""What each codec changes in a model's predictions, against the bytes that it takes.

The published figures are KIVI's (Liu et al. 2024, arXiv:2402.02750): 4 bits cost nothing that its
tasks show, 2 bits little. Here every codec goes the same way through the library's own cache.

    python experiments/codec_divergence.py [--model DIR] [--quick] [--resume] [--out DIR]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache, partial
from typing import Any

from common import QUICK, Decoding, Experiment, Setup
from matplotlib.figure import Figure

from kvjax import sizing
from kvjax.bench.report import markdown_table
from kvjax.engine import Scores
from kvjax.engine.calibrate import calibrate, rows

CODECS = (
    "f32",
    "bf16",
    "f16",
    "fp8_e4m3",
    "fp8_e4m3_head",
    "fp8_e4m3_token",
    "fp8_e5m2",
    "int8",
    "int4",
    "kivi4",
    "kivi2",
)
# Their scales are constants: 1, or calibrated on other text than is scored.
STATIC = ("fp8_e4m3", "fp8_e4m3_head")
CALIBRATION = 2048  # tokens
QUICK_CODECS = ("f32", "bf16", "fp8_e4m3", "kivi2")

# Llama-2-7B: CoQA, TruthfulQA, GSM8K, and the average of LongBench.
PUBLISHED: dict[str, Any] = {
    "source": "arXiv:2402.02750",
    "tasks": {
        "16 bits": [63.88, 30.76, 13.50, 44.52],
        "kivi4": [63.78, 30.80, 13.80, None],
        "kivi2": [63.05, 33.95, 12.74, 44.27],
    },
}

ABOUT = (
    "Rows of text are read in chunks and then decoded token by token, always through the cache "
    "under test, so that its errors compound as they do in use. KL is that of the f32 cache's "
    "next-token distribution from the tested one's, over the decoded tokens."
)


def measure(setup: Setup) -> dict[str, Any]:
    """A row for each codec, and for each with constant scales a calibrated one."""
    decoding, codecs = (QUICK, QUICK_CODECS) if setup.quick else (Decoding(), CODECS)
    exact = cache(partial(decoding.exact, setup))
    found = [
        setup.measured(name, _row, setup, decoding, codec, calibrated, exact)
        for name, codec, calibrated in (
            *((codec, codec, False) for codec in codecs),
            *((f"{codec}, calibrated", codec, True) for codec in STATIC if codec in codecs),
        )
    ]
    return {
        "decoding": asdict(decoding),
        "tokens": decoding.rows * decoding.steps,
        "calibration_tokens": CALIBRATION,
        "rows": found,
    }


def _row(
    setup: Setup, decoding: Decoding, codec: str, calibrated: bool, exact: Callable[[], Scores]
) -> dict[str, Any]:
    model, reference = setup.model, exact()
    scales = None
    if calibrated:
        batches = rows(setup.other_text[:CALIBRATION], batch=4)
        scales = calibrate(model, batches, codec=codec)
    empty = model.init_cache(decoding.rows, decoding.capacity, "dense", codec, scales=scales)
    scores, after = decoding.decoded(setup, decoding.filled(setup, empty), reference)
    spec = sizing.load(json.loads(model.config.source))
    return {
        "codec": codec,
        "calibrated": calibrated,
        "one_more_token_bytes": spec.bytes_per_token(codec),
        **decoding.figures(scores, reference, after),
    }


def page(figures: Mapping[str, Any]) -> list[str]:
    """Table of ours, what it says, and theirs."""
    rows = figures["rows"]
    bf16 = next(row for row in rows if row["codec"] == "bf16")
    exact = rows[0]
    ours = [
        [
            row["name"],
            f"{row['bytes_per_token']:,.0f}",
            f"{row['one_more_token_bytes']:,}",
            f"{bf16['bytes_per_token'] / row['bytes_per_token']:.2f}",
            f"{row['kl']:.2e} ± {row['kl_standard_error']:.0e}",
            f"{row['loss'] - exact['loss']:+.4f}",
            f"{row['same_likeliest']:.1%}",
        ]
        for row in sorted(rows, key=lambda row: -row["bytes_per_token"])
    ]
    tasks = [
        [name, *("" if x is None else f"{x:.2f}" for x in scores)]
        for name, scores in PUBLISHED["tasks"].items()
    ]
    how = figures["decoding"]
    return [
        f"{how['rows']} rows of {how['prefill']:,} tokens in chunks of {how['chunk']} and "
        f"{how['steps']} more, one at a time; {figures['tokens']:,} predictions. The loss through "
        f"f32 is {exact['loss']:.4f} nats per token. Bytes a token are those of all arrays of the "
        f"cache at the end, over its tokens; those of one more token are beside them. Scales of "
        f"*calibrated* rows are of {figures['calibration_tokens']:,} tokens of other books.",
        markdown_table(
            [
                "codec",
                "bytes a token",
                "one more",
                "bf16 / this",
                "KL, nats",
                "loss over f32",
                "same likeliest",
            ],
            ours,
        ),
        _verdict(rows),
        f"Published ({PUBLISHED['source']}, Llama-2-7B, G=32, R=128):",
        markdown_table(["cache", "CoQA", "TruthfulQA", "GSM8K", "LongBench"], tasks),
    ]


def _verdict(rows: list[Mapping[str, Any]]) -> str:
    """Which codecs nothing beats in both bytes and KL."""
    front = [row["name"] for row in rows if not any(_beats(other, row) for other in rows)]
    return f"No other is both smaller and closer to f32: {', '.join(front)}."


def _beats(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    less = [one[name] < other[name] for name in ("bytes_per_token", "kl")]
    equal = [one[name] == other[name] for name in ("bytes_per_token", "kl")]
    return all(a or b for a, b in zip(less, equal, strict=True)) and any(less)


def draw(figures: Mapping[str, Any]) -> Figure:
    """KL over bytes a token."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for row in figures["rows"]:
        if row["kl"] > 0:
            at = row["bytes_per_token"], row["kl"]
            axes.plot(*at, "o", color="C1" if row["calibrated"] else "C0")
            axes.annotate(row["name"], at, xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set(xlabel="cache bytes a token", ylabel="KL from f32, nats", xscale="log", yscale="log")
    axes.margins(x=0.2)
    return figure


EXPERIMENT = Experiment(
    "codec_divergence", "Codecs: divergence against bytes", ABOUT, measure, page, draw
)

if __name__ == "__main__":
    EXPERIMENT.main()
