"""A checkpoint with latents, converted both ways at several sizes, before and after uptraining.

TransMLA (arXiv:2502.07864) and MHA2MLA (arXiv:2502.14837) convert trained models to multi-head
latent attention, and train them further on some billions of tokens. Here the same conversions are
measured at once, beside the mean pooling of KV heads at as many bytes (arXiv:2305.13245), and
after a brief uptraining.

    python experiments/mla_conversion.py [--model DIR] [--quick] [--resume] [--out DIR]
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import Experiment, Setup
from matplotlib.figure import Figure

from kvjax import sizing
from kvjax.bench.report import markdown_table
from kvjax.convert import (
    Comparison,
    ConversionReport,
    Mha2Mla,
    MlaReport,
    TransMla,
    mla_ranks,
    to_gqa,
    to_mla,
)
from kvjax.convert.compare import compare, evaluation_windows
from kvjax.demo.presets import HELD_OUT_TEXT, PRESETS, TRAIN_TEXT
from kvjax.engine import generate_text
from kvjax.train import UptrainConfig, uptrain


@dataclass(frozen=True)
class Choice:
    """What is measured.

    Attributes:
      heads_worth: sizes of the record of a token, in KV heads of the source.
      evaluate, calibrate: tokens of the held-out text, and of the other one.
      uptraining: of the smallest record, each way, and of as many KV heads.
      new_tokens: of the text that the uptrained models write.
    """

    heads_worth: tuple[float, ...]
    evaluate: int
    calibrate: int
    uptraining: UptrainConfig
    new_tokens: int


FULL = Choice(
    heads_worth=(1.5, 1),
    evaluate=1024,
    calibrate=2048,
    uptraining=replace(PRESETS["smollm2"].uptraining, steps=20),
    new_tokens=24,
)
QUICK = Choice(
    heads_worth=(4,),
    evaluate=64,
    calibrate=256,
    uptraining=UptrainConfig(steps=2, seq_len=16, batch=2, warmup_steps=1),
    new_tokens=2,
)
PUBLISHED = [
    [
        "TransMLA",
        "GQA is always a case of MLA with a cache of the same size, and not the other way round",
    ],
    [
        "MHA2MLA",
        "0.6 to 1 % of the data recover the model; Llama-2-7B with 92.19 % fewer bytes loses 1 % "
        "on LongBench",
    ],
]
ABOUT = (
    "KL is that of the source's next-token distribution from the converted model's, in windows of "
    "256 tokens of the held-out text; layers' inputs are measured on the other text. A record is "
    "what a token leaves behind in one layer: a latent and rope keys, or keys and values. All "
    "models at one size are of the same bytes."
)


@dataclass(frozen=True)
class Made:
    """A way to make records of several sizes.

    Attributes:
      name: for the page.
      way: None for pooled heads.
      rope_dim: R.
      sizes: of records in KV heads of the source -> L, or how many KV heads are left.
    """

    name: str
    way: TransMla | Mha2Mla | None
    rope_dim: int
    sizes: Mapping[float, int]

    def measured(self, setup: Setup, choice: Choice) -> dict[str, Any]:
        """A row for each size, as it comes from the converter."""
        if self.way is None:
            with tempfile.TemporaryDirectory() as work:
                directories = {kept: Path(work, str(kept)) for kept in self.sizes.values()}
                reports: list[Any] = [
                    to_gqa(setup.directory, directory, kept, **_evaluated(choice))
                    for kept, directory in directories.items()
                ]
        else:
            ranks = tuple(self.sizes.values())
            settings = {**_calibrated(choice), **_evaluated(choice)}
            reports = list(mla_ranks(setup.directory, ranks, self.rope_dim, self.way, **settings))
        rows = (_row(report) for report in reports)
        return {"rows": [{"size": n, **row} for n, row in zip(self.sizes, rows, strict=True)]}

    def convert(self, setup: Setup, choice: Choice, size: float, directory: Path) -> None:
        """Write the model of that size."""
        kept = self.sizes[size]
        if self.way is None:
            to_gqa(setup.directory, directory, kept, evaluate_on=False)
        else:
            settings = {**_calibrated(choice), "evaluate_on": False}
            to_mla(setup.directory, directory, kept, self.rope_dim, self.way, **settings)


def _evaluated(choice: Choice) -> dict[str, Any]:
    return {"evaluate_on": HELD_OUT_TEXT, "evaluate_tokens": choice.evaluate}


def _calibrated(choice: Choice) -> dict[str, Any]:
    return {"calibrate_on": TRAIN_TEXT, "calibrate_tokens": choice.calibrate}


def makers(setup: Setup, choice: Choice) -> list[Made]:
    """TransMLA with all rope channels of one head and with half of them, MHA2MLA, pooled heads."""
    attention = setup.model.config.attention[0]
    heads, width = attention.kv_heads, attention.key_dim
    numbers = {size: round(2 * width * size) for size in choice.heads_worth}
    made = []
    for rope_dim, fold in ((width, 1), (width // 2, 2)):
        folded = f", {fold} frequencies as one" if fold > 1 else ""
        ranks = {size: n - rope_dim for size, n in numbers.items()}
        made.append(Made(f"TransMLA, R = {rope_dim}{folded}", TransMla(fold), rope_dim, ranks))
    own = width // 8 * 2
    for select in ("2-norm", "high"):
        ranks = {size: n - heads * own for size, n in numbers.items()}
        made.append(Made(f"MHA2MLA, {select}, R = {heads} × {own}", Mha2Mla(select), own, ranks))
    kept = {n: int(n) for n in choice.heads_worth if n == int(n) and heads % n == 0}
    return [*made, Made("KV heads pooled, mean", None, 0, kept)]


def measure(setup: Setup) -> dict[str, Any]:
    """All sizes as converted, and the smallest of each kind after uptraining."""
    choice = QUICK if setup.quick else FULL
    smallest, rows = min(choice.heads_worth), []
    best: dict[type, tuple[float, Made]] = {}
    for made in makers(setup, choice):
        found = setup.measured(made.name, made.measured, setup, choice)["rows"]
        rows += [{"made": made.name, **row} for row in found]
        kl = next(row["kl"] for row in found if row["size"] == smallest)
        best[type(made.way)] = min(
            best.get(type(made.way), (kl, made)), (kl, made), key=_divergence
        )
    return {
        "prompt": PRESETS["smollm2"].prompt,
        "evaluated_tokens": choice.evaluate,
        "calibration_tokens": choice.calibrate,
        "uptraining": asdict(choice.uptraining),
        "source_bytes_per_token": sizing.load(setup.directory).bytes_per_token(),
        "rows": rows,
        "uptrained": [
            setup.measured(f"{made.name}, uptrained", _uptrained, setup, choice, made)
            | {"made": made.name}
            for _, made in best.values()
        ],
    }


def _divergence(of: tuple[float, Made]) -> float:
    return of[0]


def _row(report: MlaReport | ConversionReport) -> dict[str, Any]:
    """What is kept of a report."""
    figures = report.figures()
    only_latent = ("latent_rank", "key_error", "value_error", "rope_energy")
    assert report.comparison is not None
    return {
        "bytes_per_token": report.bytes_per_token_after,
        "parameters": report.parameters_after,
        **{name: figures.get(name) for name in only_latent},
        **_compared(report.comparison),
    }


def _uptrained(setup: Setup, choice: Choice, made: Made) -> dict[str, Any]:
    """The smallest size after uptraining, with the text that it writes before and after."""
    with tempfile.TemporaryDirectory() as work:
        converted, trained = Path(work, "converted"), Path(work, "trained")
        made.convert(setup, choice, min(choice.heads_worth), converted)
        losses: list[float] = []
        uptrain(
            converted,
            trained,
            TRAIN_TEXT,
            choice.uptraining,
            save_every=choice.uptraining.total_steps,
            on_step=lambda metrics: losses.append(metrics["loss"]),
        )
        windows = evaluation_windows(setup.directory, HELD_OUT_TEXT, choice.evaluate, 0)
        compared = compare(setup.directory, trained, windows, is_text=True)
        prompts = [PRESETS["smollm2"].prompt]
        before, after = (
            generate_text(directory, prompts, choice.new_tokens, dtype="f32").texts[0]
            for directory in (converted, trained)
        )
    return {
        **_compared(compared),
        "losses": losses,
        "text_before": before,
        "text_after": after,
    }


def _compared(compared: Comparison) -> dict[str, float | None]:
    return {
        "kl": compared.kl,
        "top1_agreement": compared.top1_agreement,
        "source_loss": compared.source_loss,
        "loss": compared.converted_loss,
    }


def page(figures: Mapping[str, Any]) -> Sequence[str]:
    """Both tables, the texts, and what was claimed."""
    source, rows = figures["source_bytes_per_token"], figures["rows"]
    run = figures["uptraining"]
    smallest = min(row["size"] for row in rows)
    before = {row["made"]: row for row in rows if row["size"] == smallest}
    return [
        f"{figures['evaluated_tokens']:,} tokens; the source has {source:,} bytes a token in bf16 "
        f"and a loss of {rows[0]['source_loss']:.4f}. Errors are root mean squares of what is lost "
        f"of unrotated keys and of values, relative to their own, on "
        f"{figures['calibration_tokens']:,} other tokens; energy is the share of the keys' that "
        f"stays rotated.",
        markdown_table(
            [
                *("model", "B/token", "of source's", "L", "energy", "key error", "value error"),
                *("KL, nats", "same likeliest", "loss"),
            ],
            [_cells(row, source) for row in sorted(rows, key=lambda row: -row["bytes_per_token"])],
        ),
        f"The best of each kind at the smallest size, after {run['steps']} steps of "
        f"{run['batch']} × {run['seq_len']} tokens at a learning rate of {run['learning_rate']}:",
        markdown_table(
            ["model", "KL before", "KL after", "loss before", "loss after"],
            [
                [
                    row["made"],
                    *(f"{one['kl']:.4f}" for one in (before[row["made"]], row)),
                    *(f"{one['loss']:.4f}" for one in (before[row["made"]], row)),
                ]
                for row in figures["uptrained"]
            ],
        ),
        *(
            f"{row['made']}, {when}: “{figures['prompt']}{' '.join(row[key].splitlines())}”"
            for row in figures["uptrained"]
            for when, key in (("as converted", "text_before"), ("uptrained", "text_after"))
        ),
        "Published, of other models and tasks (2502.07864, 2502.14837):",
        markdown_table(["way", "claim"], PUBLISHED),
    ]


def _cells(row: Mapping[str, Any], source: int) -> list[str]:
    shares = ("rope_energy", "key_error", "value_error")
    return [
        row["made"],
        f"{row['bytes_per_token']:,}",
        f"{row['bytes_per_token'] / source:.0%}",
        "" if row["latent_rank"] is None else str(row["latent_rank"]),
        *("" if row[name] is None else f"{row[name]:.1%}" for name in shares),
        f"{row['kl']:.4f}",
        f"{row['top1_agreement']:.1%}",
        f"{row['loss']:.4f}",
    ]


def draw(figures: Mapping[str, Any]) -> Figure:
    """KL over bytes, and after uptraining."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    source = figures["source_bytes_per_token"]
    colours = {}
    for i, made in enumerate(dict.fromkeys(row["made"] for row in figures["rows"])):
        same = [row for row in figures["rows"] if row["made"] == made]
        colours[made] = f"C{i}"
        at = [row["bytes_per_token"] / source for row in same], [row["kl"] for row in same]
        axes.plot(*at, "o-", color=colours[made], label=made)
    for row in figures["uptrained"]:
        size = min(r["bytes_per_token"] for r in figures["rows"] if r["made"] == row["made"])
        axes.plot(size / source, row["kl"], "x", color=colours[row["made"]])
    axes.plot([], [], "kx", label="uptrained")
    axes.set(xlabel="bytes a token / source's", ylabel="KL from the source, nats", yscale="log")
    axes.legend(fontsize="small")
    return figure


EXPERIMENT = Experiment("mla_conversion", "Converted to latents", ABOUT, measure, page, draw)

if __name__ == "__main__":
    EXPERIMENT.main()
