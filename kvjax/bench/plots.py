"""A run's figures as PNG images. A plot whose quantity does not vary in the run is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

type Row = Mapping[str, Any]

# What tells rows apart, and how a label says it.
_SHAPE = {
    "contender": "{}",
    "model": "{}",
    "codec": "{}",
    "batch": "B={}",
    "query_heads": "N={}",
    "kv_heads": "K={}",
    "head_dim": "H={}",
    "length": "{} live",
    "capacity": "{} slots",
}


def draw(figures: Mapping[str, Any], directory: Path, stem: str) -> list[Path]:
    """Draw every plot that the run has data for; return the files."""
    rows = figures["rows"]
    # Models of one run differ in their KV heads; that plot is across them.
    plots = {
        "kv_heads": _latency(rows, "kv_heads", "KV heads", ignore=("model",)),
        "length": _latency(rows, "length", "live tokens a row"),
        "bandwidth": _bandwidth(rows, figures["bandwidth"]),
    }
    paths = []
    for name, plot in plots.items():
        if plot is not None:
            path = directory / f"{stem}_{name}.png"
            plot.savefig(path, dpi=120)
            paths.append(path)
    return paths


def series(rows: Sequence[Row], x: str, ignore: Sequence[str] = ()) -> list[list[Row]]:
    """Rows that differ in `x` alone (and in what is ignored), two or more, in order of x."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        key = tuple(row.get(name) for name in _SHAPE if name != x and name not in ignore)
        if row[x] is not None:
            groups.setdefault(key, []).append(row)
    return [
        sorted(group, key=lambda row: row[x])
        for group in groups.values()
        if len({row[x] for row in group}) > 1
    ]


def label(row: Row, rows: Sequence[Row], leave_out: Sequence[str] = ()) -> str:
    """What tells this row from others."""
    return " ".join(
        says.format(row[name])
        for name, says in _SHAPE.items()
        if name in row
        and name not in leave_out
        and (name == "contender" or len({other[name] for other in rows}) > 1)
    )


def _latency(rows: Sequence[Row], x: str, says: str, ignore: Sequence[str] = ()) -> Figure | None:
    """Median seconds with quartiles over x, each series above its floor."""
    groups = series(rows, x, ignore)
    if not groups:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    shown = [row for group in groups for row in group]
    floors = set()
    for group in groups:
        at = [row[x] for row in group]
        line = _plot_medians(axes, at, group, label(group[0], shown, (x, *ignore)))
        floor = tuple(row["floor_seconds"] * 1e3 for row in group)
        if floor not in floors:  # contenders at one shape share theirs
            floors.add(floor)
            axes.plot(at, floor, "--", color=line, alpha=0.6)
    axes.plot([], [], "--", color="gray", label="floor")
    axes.set(xlabel=says, ylabel="ms a step", xscale="log", yscale="log")
    ticks = sorted({row[x] for row in shown})
    axes.set_xticks(ticks, labels=[str(tick) for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.legend(fontsize="small")
    return figure


def _plot_medians(axes: Axes, at: Sequence[float], group: Sequence[Row], name: str) -> str:
    """One series; returns its colour."""
    medians = np.array([row["median_seconds"] for row in group]) * 1e3
    lower, upper = np.array([row["quartile_seconds"] for row in group]).T * 1e3
    spread = [medians - lower, upper - medians]
    return axes.errorbar(at, medians, spread, marker="o", capsize=3, label=name)[0].get_color()


def _bandwidth(rows: Sequence[Row], bandwidth: Mapping[str, Any]) -> Figure:
    """Bytes/s of every row, beside what the machine's memory was seen to do."""
    figure = Figure(figsize=(7, 1.2 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(
        [label(row, rows) for row in rows], [row["bytes_per_second"] / 1e9 for row in rows]
    )
    axes.bar_label(bars, [f" {row['share_of_floor']:.0%}" for row in rows], fontsize="small")
    for color, (name, rate) in zip("rgk", bandwidth["bytes_per_second"].items(), strict=True):
        axes.axvline(rate / 1e9, color=color, linestyle="--", label=name)
    axes.invert_yaxis()
    axes.set(xlabel=f"GB/s of live cache and weights; % of {bandwidth['yardstick']}")
    axes.legend(fontsize="small")
    return figure
