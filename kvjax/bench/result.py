"""Results as plain data, units in the names: what reports and plots are made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.bench import machine
from kvjax.bench.bandwidth import Bandwidth
from kvjax.bench.timing import Timing


def row(
    contender: str,
    shape: Mapping[str, Any],
    nbytes: int,
    flop: int,
    timing: Timing,
    bandwidth: Bandwidth,
) -> dict[str, Any]:
    """One contender at one shape.

    Args:
      contender: who.
      shape: what it ran on; `batch` among it.
      nbytes, flop: what a step has to read, and to compute.
      timing: of the steps.
      bandwidth: of the machine, in the same rounds.
    """
    lower, upper = timing.quartiles
    floor = nbytes / bandwidth.best
    return {
        "contender": contender,
        **shape,
        "bytes_per_step": nbytes,
        "flop_per_step": flop,
        "intensity_flop_per_byte": flop / nbytes,
        "median_seconds": timing.median,
        "quartile_seconds": [lower, upper],
        "sample_seconds": list(timing.samples),
        "calls_per_sample": timing.calls,
        "tokens_per_second": shape["batch"] / timing.median,
        "bytes_per_second": nbytes / timing.median,
        "share_of_copy": nbytes / timing.median / bandwidth.bytes_per_second["copy"],
        "floor_seconds": floor,
        "share_of_floor": floor / timing.median,
    }


def collect(
    subject: str,
    rows: list[dict[str, Any]],
    bandwidth: Bandwidth,
    settings: Mapping[str, Any],
    absent: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A whole run.

    Args:
      subject: "decode attention" or "decode step".
      rows: from `row`.
      bandwidth: the one that the rows' floors are taken from.
      settings: rounds and seed.
      absent: contenders that could not take part, and why.
    """
    return {
        "subject": subject,
        "machine": machine.describe(),
        "settings": dict(settings),
        "bandwidth": bandwidth.figures(),
        "absent": dict(absent or {}),
        "rows": rows,
    }
