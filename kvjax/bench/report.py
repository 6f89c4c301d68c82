"""A run's figures as text: a table, Markdown, and files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

type Row = Mapping[str, Any]
# What a quantity that a row does not have says.
_WITHOUT = {"kv_heads": "mixed", "window": "none"}
# What rows may differ in, by its heading.
_SHAPE = {
    "contender": "contender",
    "model": "model",
    "batch": "B",
    "query_heads": "N",
    "kv_heads": "K",
    "head_dim": "H",
    "length": "live",
    "capacity": "slots",
    "layout": "layout",
    "window": "window",
    "codec": "codec",
    "weight_codec": "weights",
}
_MEASURED: dict[str, Callable[[Row], str]] = {
    "ms": lambda row: f"{row['median_seconds'] * 1e3:.3g}",
    "quartiles": lambda row: "-".join(f"{s * 1e3:.3g}" for s in row["quartile_seconds"]),
    "GB/s": lambda row: f"{row['bytes_per_second'] / 1e9:.3g}",
    "FLOP/B": lambda row: f"{row['intensity_flop_per_byte']:.3g}",
    "floor ms": lambda row: f"{row['floor_seconds'] * 1e3:.3g}",
    "of floor": lambda row: f"{row['share_of_floor']:.0%}",
}
_LAST: dict[str, tuple[str, Callable[[Row], str]]] = {
    "decode attention": ("/ kvjax", lambda row: _ratio(row["seconds_over_kvjax"])),
    "decode step": ("tokens/s", lambda row: f"{row['tokens_per_second']:,.0f}"),
    "cached attention": ("MB read", lambda row: f"{row['bytes_per_step'] / 1e6:,.1f}"),
}


def print_tables(figures: Mapping[str, Any]) -> None:
    """Print a run: its table, the machine, and its bounds if it has some."""
    # Wide enough for every table: in a narrower terminal lines wrap, and nothing is cut off.
    console = Console(width=max(120, Console().width))
    console.print(_rich(figures["subject"], *table(figures)))
    for line in notes(figures):
        console.print(line, highlight=False)
    if "bounds" in figures:
        console.print(_rich("bounds", *bounds_table(figures)))


def table(figures: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a run; the shape that all rows share is in `notes`."""
    rows = figures["rows"]
    columns = _MEASURED | dict([_LAST[figures["subject"]]])
    different = [name for name in _SHAPE if _values(rows, name) > 1]
    return [*(_SHAPE[name] for name in different), *columns], [
        [*(_shown(row, name) for name in different), *(cell(row) for cell in columns.values())]
        for row in rows
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
    machine, bandwidth, rows = figures["machine"], figures["bandwidth"], figures["rows"]
    same = ", ".join(
        f"{heading} {_shown(rows[0], name)}"
        for name, heading in _SHAPE.items()
        if _values(rows, name) == 1
    )
    rates = ", ".join(
        f"{name} {rate / 1e9:.3g}" for name, rate in bandwidth["bytes_per_second"].items()
    )
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return [
        f"All rows: {same}. Bytes are those of the live cache and, in whole steps, the weights.",
        f"Medians of {figures['settings']['rounds']} interleaved rounds on {machine['backend']} "
        f"({machine['device']}; {machine['cpu']}, {machine['threads']} threads, "
        f"load {machine['load_average']}); {versions}.",
        f"Memory in the same rounds, GB/s: {rates} (copy and update count bytes read and written, "
        f"read bytes read). A floor is a step's bytes at the fastest, {bandwidth['yardstick']}.",
        *(f"Absent: {name}, {reason}." for name, reason in figures["absent"].items()),
    ]


def markdown(figures: Mapping[str, Any], plots: Iterable[str] = ()) -> str:
    """A run as a page; `plots` are the names of images beside it."""
    parts = [f"# {figures['subject'].capitalize()}", markdown_table(*table(figures))]
    if "bounds" in figures:
        parts.append(markdown_table(*bounds_table(figures)))
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


def _values(rows: Sequence[Row], name: str) -> int:
    """How many different values the rows have; 0 where they lack the field."""
    return len({row[name] for row in rows if name in row})


def _shown(row: Row, name: str) -> str:
    return _WITHOUT[name] if row[name] is None else str(row[name])


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3g}"


def _rich(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    return shown


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text in Markdown, all columns but the first to the right."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
