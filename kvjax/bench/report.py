"""A run's figures as text: a table, Markdown, and files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

type Row = Mapping[str, Any]
type Column = tuple[str, Callable[[Row], str]]

_SHAPE: tuple[Column, ...] = (
    ("B", lambda row: str(row["batch"])),
    ("K", lambda row: "mixed" if row["kv_heads"] is None else str(row["kv_heads"])),
    ("live", lambda row: str(row["length"])),
    ("slots", lambda row: str(row["capacity"])),
    ("codec", lambda row: row["codec"]),
)
_MEASURED: tuple[Column, ...] = (
    ("ms", lambda row: f"{row['median_seconds'] * 1e3:.3g}"),
    ("quartiles", lambda row: " - ".join(f"{s * 1e3:.3g}" for s in row["quartile_seconds"])),
    ("GB/s", lambda row: f"{row['bytes_per_second'] / 1e9:.3g}"),
    ("of copy", lambda row: f"{row['share_of_copy']:.0%}"),
    ("floor ms", lambda row: f"{row['floor_seconds'] * 1e3:.3g}"),
    ("of floor", lambda row: f"{row['share_of_floor']:.0%}"),
    ("FLOP/B", lambda row: f"{row['intensity_flop_per_byte']:.3g}"),
)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "decode attention": (
        ("", lambda row: row["contender"]),
        ("N", lambda row: str(row["query_heads"])),
        ("H", lambda row: str(row["head_dim"])),
        *_SHAPE,
        *_MEASURED,
        ("/ kvjax", lambda row: _ratio(row["seconds_over_kvjax"])),
    ),
    "decode step": (
        ("model", lambda row: row["model"]),
        *_SHAPE,
        ("weights", lambda row: row["weight_codec"]),
        *_MEASURED,
        ("tokens/s", lambda row: f"{row['tokens_per_second']:,.0f}"),
    ),
}


def print_tables(figures: Mapping[str, Any]) -> None:
    """Print a run: its table, the machine, and its bounds if it has some."""
    console = Console()
    console.print(_rich(figures["subject"], *table(figures)))
    for line in notes(figures):
        console.print(line, highlight=False)
    if "bounds" in figures:
        console.print(_rich("bounds", *bounds_table(figures)))


def table(figures: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a run."""
    columns = COLUMNS[figures["subject"]]
    return [name for name, _ in columns], [
        [cell(row) for _, cell in columns] for row in figures["rows"]
    ]


def bounds_table(figures: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of what a run is held to."""
    verdict = {True: "holds", False: "MISSED", None: "not measured"}
    return ["", "ratio", "at most", ""], [
        [bound["says"], _ratio(bound["ratio"]), f"{bound['most']:.3g}", verdict[bound["holds"]]]
        for bound in figures["bounds"]
    ]


def notes(figures: Mapping[str, Any]) -> list[str]:
    """Sentences on what a run was measured on and against."""
    machine, bandwidth = figures["machine"], figures["bandwidth"]
    rates = ", ".join(
        f"{name} {rate / 1e9:.3g}" for name, rate in bandwidth["bytes_per_second"].items()
    )
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return [
        f"Medians of {figures['settings']['rounds']} interleaved rounds on {machine['backend']} "
        f"({machine['device']}; {machine['cpu']}, {machine['threads']} threads, "
        f"load {machine['load_average']}); {versions}.",
        f"Memory in the same rounds, GB/s: {rates} (copy and update: bytes read and written; "
        f"read: bytes read). The floor is a step's bytes at the rate of {bandwidth['yardstick']}.",
        *(f"Absent: {name}, {reason}." for name, reason in figures["absent"].items()),
    ]


def markdown(figures: Mapping[str, Any], plots: Iterable[str] = ()) -> str:
    """A run as a page; `plots` are the names of images beside it."""
    parts = [f"# {figures['subject'].capitalize()}", _pipes(*table(figures))]
    if "bounds" in figures:
        parts.append(_pipes(*bounds_table(figures)))
    parts += [*notes(figures), *(f"![{name}]({name})" for name in plots)]
    return "\n\n".join(parts) + "\n"


def write(figures: Mapping[str, Any], directory: str | os.PathLike[str]) -> list[Path]:
    """Write a run as JSON, Markdown and, where matplotlib is installed, plots; return the files.

    Names begin with the run's subject. Each file appears whole or not at all.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    stem = figures["subject"].replace(" ", "_")
    try:
        from kvjax.bench.plots import draw

        plots = draw(figures, directory, stem)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        plots = []
    page = markdown(figures, (path.name for path in plots))
    return [
        write_whole(directory / f"{stem}.json", json.dumps(figures, indent=2) + "\n"),
        write_whole(directory / f"{stem}.md", page),
        *plots,
    ]


def write_whole(path: Path, text: str) -> Path:
    """Write beside `path`, then rename."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, "utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3g}"


def _rich(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    shown = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    return shown


def _pipes(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
