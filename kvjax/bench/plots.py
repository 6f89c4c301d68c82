"""A run's figures as PNG images. A plot whose quantity does not vary in the run is left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

type Row = Mapping[str, Any]

# Who was measured, which gives lines, and at what, which gives panels; and how labels say it.
_WHO = {"contender": "{}", "model": "{}"}
_SHAPE = {
    "codec": "{}",
    "batch": "B={}",
    "query_heads": "N={}",
    "kv_heads": "K={}",
    "head_dim": "H={}",
    "length": "{} live",
    "capacity": "{} slots",
    "layout": "{}",
    "window": "window {}",
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


def panels(
    rows: Sequence[Row], x: str, ignore: Sequence[str] = ()
) -> dict[tuple, dict[tuple, list[Row]]]:
    """Lines over `x`: rows by shape, then by who was measured, in order of x.

    What is ignored tells no rows apart. A line needs two values of x.
    """
    found: dict[tuple, dict[tuple, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted((row for row in rows if row[x] is not None), key=lambda row: row[x]):
        shape = tuple(row.get(name) for name in _SHAPE if name != x)
        who = tuple(row.get(name) for name in _WHO if name not in ignore)
        found[shape][who].append(row)
    lines = {
        shape: {who: line for who, line in by_who.items() if line[0][x] != line[-1][x]}
        for shape, by_who in found.items()
    }
    return {shape: by_who for shape, by_who in lines.items() if by_who}


def label(row: Row, rows: Sequence[Row], names: Mapping[str, str], leave_out: str = "") -> str:
    """What tells this row from others."""
    return " ".join(
        says.format(row[name])
        for name, says in names.items()
        if name in row and name != leave_out and len({other[name] for other in rows}) > 1
    )


def _latency(rows: Sequence[Row], x: str, says: str, ignore: Sequence[str] = ()) -> Figure | None:
    """Median seconds with quartiles over x, above the floor; one panel a shape."""
    found = list(panels(rows, x, ignore).values())
    if not found:
        return None
    columns = min(3, len(found))
    height = -(-len(found) // columns)
    figure = Figure(figsize=(1 + 3.5 * columns, 3.2 * height), layout="constrained")
    grid = figure.subplots(height, columns, squeeze=False, sharey=True)
    who = {name: says for name, says in _WHO.items() if name not in ignore}
    handles: dict[str, Any] = {}
    for axes, lines in zip(grid.flat, found, strict=False):
        for line in lines.values():
            name = label(line[0], rows, who) or line[0]["contender"]
            color = handles[name][0].get_color() if name in handles else f"C{len(handles)}"
            handles[name] = _plot_line(axes, x, line, color)
        at = [row[x] for row in line]
        axes.plot(at, [row["floor_seconds"] * 1e3 for row in line], "k--")
        axes.set(title=label(line[0], rows, _SHAPE, leave_out=x), xscale="log", yscale="log")
        axes.set(xlabel=says, ylabel="ms a step")
        axes.set_xticks(at, labels=[str(value) for value in at])
        axes.set_xticks([], minor=True)
    for axes in grid.flat[len(found) :]:
        axes.remove()
    handles["floor"] = grid[0, 0].lines[-1]
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")
    return figure


def _plot_line(axes: Axes, x: str, line: Sequence[Row], color: str) -> ErrorbarContainer:
    medians = np.array([row["median_seconds"] for row in line]) * 1e3
    lower, upper = np.array([row["quartile_seconds"] for row in line]).T * 1e3
    at, spread = [row[x] for row in line], [medians - lower, upper - medians]
    return axes.errorbar(at, medians, spread, marker="o", capsize=3, color=color)


def _bandwidth(rows: Sequence[Row], bandwidth: Mapping[str, Any]) -> Figure:
    """Bytes/s of every row, beside what the machine's memory was seen to do."""
    figure = Figure(figsize=(7, 1.2 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [label(row, rows, _WHO | _SHAPE) or row["contender"] for row in rows]
    bars = axes.barh(names, [row["bytes_per_second"] / 1e9 for row in rows])
    axes.bar_label(bars, [f" {row['share_of_floor']:.0%}" for row in rows], fontsize="small")
    for color, (name, rate) in zip("rgk", bandwidth["bytes_per_second"].items(), strict=True):
        axes.axvline(rate / 1e9, color=color, linestyle="--", label=name)
    axes.margins(y=0.02)
    axes.invert_yaxis()
    axes.set(xlabel=f"GB/s of live cache and weights; % of {bandwidth['yardstick']}")
    figure.legend(loc="outside upper right", ncols=3)
    return figure
