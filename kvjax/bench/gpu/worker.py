"""The process that `scripts/bench_gpu.py` starts: it checks and measures, and writes a journal.

    python -m kvjax.bench.gpu.worker --journal FILE --stage main

What the journal says was begun is not begun again, so that a worker goes on where another was
lost. Its entries, beside those of `journal`: "machine", "plan" (the names of a stage's cases),
"bandwidth", "compiled", "check" and "row".
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.bench import machine
from kvjax.bench.bandwidth import Bandwidth, probes
from kvjax.bench.gpu import presets
from kvjax.bench.gpu.ahead import compile_all
from kvjax.bench.gpu.checks import check, compiled
from kvjax.bench.gpu.journal import Journal
from kvjax.bench.gpu.presets import TORCH, Point
from kvjax.bench.gpu.shape import DecodeShape
from kvjax.bench.gpu.timed import ROUNDS, Bench, says_error
from kvjax.bench.timing import interleave
from kvjax.sizing import CHIPS
from kvjax.sizing.roofline import Chip

STAGES = ("main", TORCH)
# Exit status of a process that has lost its device, and must be started anew.
DEVICE_LOST = 3
# Slots of a row in checks.
SLOTS, TINY_SLOTS = 1024, 192
# Of the arrays that are copied.
PROBE_BYTES, TINY_PROBE_BYTES = 2**30, 2**22

# Chips by what CUDA calls them; the first that fits.
KINDS = {
    "H200": "H200",
    "H100 PCIe": "H100-PCIe",
    "H100": "H100-SXM",
    "A100-SXM4-80GB": "A100-80",
    "A100": "A100-40",
    "B200": "B200",
    "B300": "B300",
}


@dataclass(frozen=True)
class Run:
    """What a worker goes by.

    Attributes:
      journal: of the run.
      deadline: seconds of the epoch beyond which nothing is begun.
      only: found in the names of the cases that are wanted.
      jobs: programs that are compiled at once; 1 for each in the case that it is for.
      quick, interpret: as the options of that name.
    """

    journal: Journal
    deadline: float
    only: re.Pattern[str]
    jobs: int
    quick: bool
    interpret: bool

    def wanted(self, name: str) -> bool:
        """Whether a case is to be begun now."""
        return (
            self.only.search(name) is not None
            and time.time() < self.deadline
            and name not in self.journal.begun()
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--stage", choices=STAGES, required=True)
    parser.add_argument("--deadline", type=float, default=float("inf"))
    parser.add_argument("--only", type=re.compile, default=re.compile(""))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--interpret", action="store_true")
    given = vars(parser.parse_args(arguments))
    stage, run = given.pop("stage"), Run(Journal(given.pop("journal")), **given)
    if jax.default_backend() != "gpu" and not (run.quick or run.interpret):
        sys.exit("jax finds no GPU; on a CPU, --interpret and --quick can be run")
    shapes = {} if stage == TORCH else checks(run)
    points = [] if run.interpret else timings(run, stage)
    if not run.journal.of("machine"):
        run.journal.write("machine", **describe())
    names = [*shapes, *(point.name for point in points)]
    run.journal.write("plan", names=[name for name in names if run.only.search(name)])
    hold(run, shapes)
    measure(run, points)


def describe() -> dict[str, Any]:
    """The machine, its chip and its driver."""
    device, known = jax.devices()[0], chip()
    return {
        **machine.describe(),
        "platform_version": device.client.platform_version,
        "driver": _driver(),
        "chip": None if known is None else known.name,
        "memory_limit_bytes": (device.memory_stats() or {}).get("bytes_limit"),
    }


def chip() -> Chip | None:
    """The device, if its peaks are known."""
    kind = jax.devices()[0].device_kind
    return next((CHIPS[name] for says, name in KINDS.items() if says in kind), None)


def checks(run: Run) -> dict[str, DecodeShape]:
    """The shapes that are checked, by name."""
    found = presets.checks(TINY_SLOTS if run.quick or run.interpret else SLOTS)
    return {f"check: {name}": shape for name, shape in found.items()}


def timings(run: Run, stage: str) -> list[Point]:
    """The points of a stage."""
    points = [point for point in presets.points() if (point.sweep == TORCH) == (stage == TORCH)]
    return [presets.quick(point) for point in points] if run.quick else points


def hold(run: Run, shapes: Mapping[str, DecodeShape]) -> None:
    """Hold the kernels against float64."""
    wanted = {name: shape for name, shape in shapes.items() if run.wanted(name)}
    builds = {
        name: partial(compiled, shape, interpret=run.interpret) for name, shape in wanted.items()
    }
    ahead = _compiled_ahead(run, "checks", builds)
    for name, shape in wanted.items():
        if run.wanted(name):
            about = {"kernel": presets.kernel(shape), "shape": presets.label(shape)}
            with run.journal.case(name, **about):
                try:
                    call = ahead[name].result() if name in ahead else builds[name]()
                    found = check(shape, call, interpret=run.interpret)
                except Exception as error:
                    found = {"passed": False, "error": says_error(error)}
                run.journal.write("check", name=name, **about, **found)
            _leave_if_lost()


def measure(run: Run, points: Sequence[Point]) -> None:
    """Time points, sweep by sweep. A sweep's programs are compiled before it, none beside it."""
    bench = None
    for sweep, group in groupby(points, key=lambda point: point.sweep):
        wanted = [point for point in group if run.wanted(point.name)]
        if not wanted:
            continue
        bench = bench or _bench(run)
        bench.ahead.update(_compiled_ahead(run, sweep, bench.builds(wanted)))
        for point in wanted:
            if run.wanted(point.name):
                _time(run, bench, point)


def _compiled_ahead[Key](
    run: Run, what: str, builds: Mapping[Key, Callable[[], Any]]
) -> dict[Key, Future[Any]]:
    """All programs of a part, compiled at once, unless each is to be compiled in its own case."""
    if run.jobs == 1 or not builds:
        return {}
    with run.journal.case(f"compiling {what}"):
        return compile_all(
            builds,
            run.jobs,
            lambda _, seconds: run.journal.write("compiled", seconds=round(seconds, 2)),
            run.deadline,
        )


def _bench(run: Run) -> Bench:
    """What points are timed with; the device's bandwidth goes into the journal."""
    moves = probes(TINY_PROBE_BYTES if run.quick else PROBE_BYTES)
    bandwidth = Bandwidth.of(moves, interleave(moves, ROUNDS))
    run.journal.write("bandwidth", **bandwidth.figures())
    return Bench(moves["copy"], chip(), run.quick)


def _time(run: Run, bench: Bench, point: Point) -> None:
    with run.journal.case(point.name):
        try:
            for row in bench.rows(point):
                run.journal.write("row", **row)
        except Exception as error:
            failed = {"contender": "all", "sweep": point.sweep, "point": point.name}
            run.journal.write("row", **failed, error=says_error(error))
    _leave_if_lost()


def _leave_if_lost() -> None:
    """End the process where an illegal access, say, has left its device unusable."""
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception:
        sys.exit(DEVICE_LOST)


def _driver() -> str | None:
    """What nvidia-smi says of driver, clocks and power; None where there is none."""
    asked = "driver_version,clocks.max.sm,clocks.max.memory,power.limit"
    try:
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


if __name__ == "__main__":
    main()
