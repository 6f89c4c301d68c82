"""What `kvjax size` and `kvjax plan` compute, as PNG images."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvjax.sizing import ModelSpec
from kvjax.sizing.placement import Placement, Placing

_PLAIN = asdict(Placement())
_LONGEST = 2**20  # tokens, the longest context that models are published with


def bytes_against_context(
    specs: Mapping[str, ModelSpec],
    file: str,
    *,
    batch: int = 1,
    codec: str = "bf16",
    **placing: Unpack[Placing],
) -> None:
    """Draw the cache's bytes (allocated, states and tables) over the context, a line a model.

    Args:
        specs: the models by name.
        file: the PNG to write.
        batch, codec, placing: as in `ModelSpec.cache_bytes`.
    """
    figure, axes = _axes("tokens of context", "GiB of cache")
    contexts = [2**power for power in range(8, _LONGEST.bit_length())]
    for name, spec in specs.items():
        sizes = [spec.cache_bytes(n, batch, codec, **placing).total / 2**30 for n in contexts]
        axes.plot(contexts, sizes, marker=".", label=name)
    said = ", ".join(f"{name} {value}" for name, value in placing.items() if value != _PLAIN[name])
    title = f"{batch} × tokens, {codec}{', ' if said else ''}{said}"
    axes.set(title=title, xscale="log", yscale="log")
    _powers_of_two(axes, contexts)
    _save(figure, file)


def floor_against_batch(rows: Mapping[str, Sequence[Mapping[str, Any]]], file: str) -> None:
    """Draw the least time of a decode step over the batch, a line a chip, as long as it fits.

    Args:
        rows: for each chip, rows of `sizing.batch_sweep`.
        file: the PNG to write.
    """
    figure, axes = _axes("sequences", "ms a decode step, at least")
    batches: list[int] = []
    for name, sweep in rows.items():
        at = [row["batch"] for row in sweep]
        axes.plot(at, [row["floor_seconds"] * 1e3 for row in sweep], marker=".", label=name)
        batches = max(batches, at, key=len)
    axes.set(xscale="log", yscale="log")
    _powers_of_two(axes, batches)
    _save(figure, file)


def _axes(across: str, up: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=across, ylabel=up)
    axes.grid(alpha=0.3)
    return figure, axes


def _powers_of_two(axes: Axes, at: Sequence[int]) -> None:
    axes.set_xticks(at, labels=[_short(number) for number in at])
    axes.set_xticks([], minor=True)


def _short(number: int) -> str:
    for power, unit in ((20, "M"), (10, "K")):
        if number >= 2**power and number % 2**power == 0:
            return f"{number >> power}{unit}"
    return str(number)


def _save(figure: Figure, file: str) -> None:
    """Write the PNG whole or not at all."""
    path = Path(file)
    if path.suffix.lower() != ".png":
        raise ValueError(f"plot: got {file!r}; accepted: a file name that ends in .png")
    figure.axes[0].legend()
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(beside, dpi=120, format="png")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
