"""Check the decode kernels on the GPU at hand, then measure them beside their peers.

    python scripts/bench_gpu.py                            # in under 6 minutes
    python scripts/bench_gpu.py --quick                    # all of it at tiny sizes
    python scripts/bench_gpu.py --interpret                # the checks alone, simulated on a CPU
    python scripts/bench_gpu.py --only '^article|^group'   # cases whose name this is found in

First every kernel is held against float64. Dead slots and unused pages hold NaN, page tables are
shuffled with garbage behind their ends, memory that outputs are likely to get holds NaN, several
sets of queries follow each other so that nothing stale can pass, and repeated calls must agree to
the bit. A failure is reported and makes the timings of that kernel invalid; the rest goes on, and
the exit status is 1.

Then shapes are timed, the most important first, in rounds interleaved with a large device copy:
its bytes read and written over its median time are the yardstick. Bytes of a row are those of the
live cache; its floor is the longer of these bytes over the yardstick, and FLOP over the chip's
matrix peak. Calls shorter than their dispatch are chained in one program, each fed by the output
of the one before, over as many caches as exceed L2 eight times (32 at most; "set MB" says how much
that is): see `kvjax/bench/gpu/chained.py`. Two heads of each contender's output at the timed shape
are held against float64, too.

All of this is done by `kvjax.bench.gpu.worker`, a process of its own, and written beside --out as
soon as it is there. Where that process hangs or dies, another goes on behind the case that it was
at. What --seconds leaves no time for is listed. Needs the standard library, numpy and jax; peers
that are not installed are left out.
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvjax.bench.gpu import report
from kvjax.bench.gpu.journal import Entry, Journal

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
FIGURES = ROOT / "tests" / "sizing" / "seed_figures.json"

# Seconds without a new entry in the journal after which a worker is taken to hang.
STALL, INTERPRETED_STALL = 60.0, 240.0
# Seconds beyond the deadline for the case that was begun before it.
GRACE = 20.0
POLL = 0.1
# Workers of a stage, should each be lost.
MOST_WORKERS = 8
# Characters of a lost worker's messages that are kept.
MESSAGES = 3000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a command; returns the exit status."""
    given = parse(arguments)
    directory = given.out.resolve().parent if given.out else default_directory(given)
    directory.mkdir(parents=True, exist_ok=True)
    journal = Journal(directory / f".{given.out.stem if given.out else 'gpu'}.partial.jsonl")
    journal.path.unlink(missing_ok=True)
    start, progress = time.time(), Progress()
    for stage in stages(given):
        for entry in run_stage(stage, given, journal, start + given.seconds):
            progress.show(entry)
    about = {"options": options(given), "seconds": round(time.time() - start, 1)}
    figures = report.collect(journal.entries(), published(), about)
    for text in report.summary(figures):
        print(text)
    kind = re.sub(r"\W+", "_", figures["machine"].get("device", "unknown")).lower()
    out = given.out or directory / f"gpu_{kind}.json"
    write_whole(out, json.dumps(figures, indent=1, allow_nan=False) + "\n")
    journal.path.unlink()
    print(f"\nwritten: {out}")
    return 1 if figures["failures"] else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="everything at tiny sizes")
    parser.add_argument(
        "--interpret", action="store_true", help="the checks alone, simulated on a CPU"
    )
    parser.add_argument("--seconds", type=float, default=330, help="nothing is begun later (330)")
    parser.add_argument("--only", default="", help="regular expression found in a case's name")
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(8, os.cpu_count() or 1),
        help="programs compiled at once, before their sweep is timed",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="results; by default gpu_DEVICE.json, of whole runs in experiments/results",
    )
    return parser.parse_args(arguments)


def default_directory(given: argparse.Namespace) -> Path:
    """Of whole runs, where results are kept; of others, where nothing is."""
    whole = not (given.quick or given.interpret or given.only)
    return RESULTS if whole else Path(tempfile.gettempdir())


def options(given: argparse.Namespace) -> dict[str, Any]:
    """As plain data, without paths."""
    return {name: x for name, x in vars(given).items() if name != "out"}


def stages(given: argparse.Namespace) -> list[str]:
    """The worker's stages; torch runs in a process of its own, if there is a torch."""
    torch = not given.interpret and importlib.util.find_spec("torch") is not None
    return ["main", *["torch"] * torch]


def run_stage(
    stage: str, given: argparse.Namespace, journal: Journal, deadline: float
) -> Iterator[Entry]:
    """Run workers until one comes to the stage's end; gives the journal's new entries."""
    jobs = given.jobs
    stall = INTERPRETED_STALL if given.interpret else STALL
    for _ in range(MOST_WORKERS):
        begun = journal.begun()
        command = [
            *(sys.executable, "-m", "kvjax.bench.gpu.worker"),
            *(f"--journal={journal.path}", f"--stage={stage}", f"--deadline={deadline}"),
            *(f"--only={given.only}", f"--jobs={jobs}"),
            *(f"--{name}" for name in ("quick", "interpret") if getattr(given, name)),
        ]
        reason = yield from supervise(
            command, environment(stage, given.interpret), journal, stall, deadline + GRACE
        )
        if reason is None:
            return
        journal.lose(reason)
        yield journal.entries()[-1]
        # One that died before it began anything would do so again.
        if time.time() > deadline or journal.begun() == begun:
            return
        # What was lost while programs were compiled together is found by compiling each alone.
        jobs = 1


def environment(stage: str, interpret: bool) -> dict[str, str]:
    """Of a worker: this tree's kvjax, and in torch's stage memory that jax leaves to torch."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    added = {"PYTHONPATH": path}
    if interpret:
        added["JAX_PLATFORMS"] = "cpu"
    if stage == "torch":
        added["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return os.environ | added


def supervise(
    command: Sequence[str], env: dict[str, str], journal: Journal, stall: float, end: float
) -> Generator[Entry, None, str | None]:
    """Run a worker to its end; gives the journal's new entries, and returns why it was lost.

    Args:
      command, env: of the worker, which writes to the journal.
      journal: whose entries are signs of life.
      stall: seconds without one after which it is stopped.
      end: seconds of the epoch at which it is stopped in any case.
    """
    messages = journal.path.with_suffix(".messages")
    seen, alive = len(journal.entries()), time.time()
    with messages.open("wb") as file:
        # A session of its own, so that what it started is stopped with it.
        process = subprocess.Popen(
            command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        stopped = None
        while process.poll() is None and stopped is None:
            time.sleep(POLL)
            new = journal.entries()[seen:]
            yield from new
            seen, now = seen + len(new), time.time()
            alive = now if new else alive
            if now > end or now - alive > stall:
                stopped = "time was up" if now > end else f"no sign of life for {stall:.0f} s"
                os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    yield from journal.entries()[seen:]
    said = messages.read_text("utf-8", "replace")[-MESSAGES:]
    messages.unlink()
    if status == 0:
        return None
    return f"{stopped or f'the process ended with status {status}'}; its last messages: {said}"


class Progress:
    """Prints entries as they come."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._sweep: str | None = None

    def show(self, entry: Entry) -> None:
        self._entries.append(entry)
        match entry["kind"]:
            case "machine":
                print(f"{entry['device']}, driver {entry['driver']}, chip {entry['chip']}")
            case "bandwidth":
                rates = entry["bytes_per_second"].items()
                print("\nGB/s: " + ", ".join(f"{name} {x / 1e9:.0f}" for name, x in rates))
            case "check":
                print(report.check_line(entry))
            case "lost":
                print(f"LOST    {entry['name']}: {entry['reason'].splitlines()[0]}")
            case "row":
                if entry["sweep"] != self._sweep:
                    self._sweep = entry["sweep"]
                    print(f"\n{self._sweep}\n{report.heading()}")
                print(report.line(entry, report.doubtful_kernels(self._entries)))
        sys.stdout.flush()


def published() -> dict[str, float]:
    """The article's figures, by id."""
    return {row["id"]: row["expected"] for row in json.loads(FIGURES.read_text("utf-8"))}


def write_whole(path: Path, text: str) -> None:
    """Write beside `path`, then rename."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, "utf-8")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
