"""The demo's report: Markdown, JSON and plots."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from kvjax.bench.plots import draw
from kvjax.bench.report import markdown_table, notes, table, write_whole
from kvjax.demo.run import DemoReport


def write_report(report: DemoReport, out_dir: Path) -> Path:
    """Write report.md with its plots and report.json to out_dir; returns the Markdown file."""
    write_whole(out_dir / "report.json", json.dumps(asdict(report), indent=2) + "\n")
    _plot_losses(report, out_dir / "losses.png")
    plots = [path.name for path in draw(report.decode, out_dir, "decode_step")]
    return write_whole(out_dir / "report.md", "\n\n".join(_sections(report, plots)) + "\n")


def _sections(report: DemoReport, decode_plots: list[str]) -> list[str]:
    name, uptrained = report.uptrained
    sections = [
        f"# From MHA to GQA: {report.title}",
        "Measured on this machine in this run, but for bytes per token, which follow from the "
        "config. Losses are nats per token on books that uptraining does not see.",
        "## What a token costs",
        markdown_table(
            ("KV heads", "cache bytes per token (bf16)"),
            [(str(heads), f"{size:,}") for heads, size in report.bytes_per_token.items()],
        ),
        "## Converted, then uptrained",
        markdown_table(
            ("model", "loss"),
            [(label, f"{loss:.3f}") for label, loss in report.losses.items()]
            + [(name, f"**{uptrained:.3f}**")],
        ),
        f"![Losses](losses.png)\n\nUptraining took {len(report.uptraining)} steps.",
    ]
    if report.twin_restored is not None:
        same = "the same bits" if report.twin_restored else "DIFFERENT bits"
        sections.append(f"Written out as MHA and pooled back, the source came back with {same}.")
    sections += ["## What they write"]
    sections += [f"**{label}**\n\n> {_quote(text)}" for label, text in report.texts.items()]
    sections += [
        "## Decode",
        "A whole step: one more token for every row, weights and live cache read once.",
        markdown_table(*table(report.decode)),
        *notes(report.decode),
        *(f"![{plot}]({plot})" for plot in decode_plots),
    ]
    return sections


def _quote(text: str) -> str:
    return text.replace("\n", "\n> ")


def _plot_losses(report: DemoReport, path: Path) -> None:
    """Loss of each conversion as bars, and of each uptraining step as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    bars, line = figure.subplots(1, 2)
    name, uptrained = report.uptrained
    losses = {**report.losses, name: uptrained}
    bars.barh(list(losses), list(losses.values()))
    bars.invert_yaxis()
    bars.set_xlabel("held-out loss (nats per token)")
    line.plot(range(1, len(report.uptraining) + 1), report.uptraining)
    line.axhline(report.losses["source"], linestyle="--", color="grey", label="source, held out")
    line.set_xlabel("uptraining step")
    line.set_ylabel("training loss (nats per token)")
    line.legend()
    figure.savefig(path)
