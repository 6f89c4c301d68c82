"""Runs workers, one process after another, so that none takes the rest down with it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from kernel_check.budgets import Fault

SCRIPTS = Path(__file__).resolve().parents[1]
WORKER = (sys.executable, "-m", "kernel_check.worker")
# Lines of a dead process's errors that are shown.
LAST_LINES = 5


@dataclass(frozen=True)
class Result:
    """What was found of one row."""

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    seconds: float = 0.0


@dataclass
class Run:
    """What was found on one target, with the versions of what compiled it."""

    versions: dict[str, str] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)


def environment_of_worker(dump: Path) -> dict[str, str]:
    """Of a worker: no device, the compilers of this environment first, and machine code dumped.

    Raises:
      RuntimeError: if the compilers are not installed.
    """
    spec = importlib.util.find_spec("nvidia")
    places = (
        []
        if spec is None
        else [Path(p, "cu13", "bin") for p in spec.submodule_search_locations or ()]
    )
    binaries = next((place for place in places if (place / "ptxas").exists()), None)
    if binaries is None or importlib.util.find_spec("jax_plugins") is None:
        raise RuntimeError(
            f"{sys.executable} has no CUDA compilers; `make check-kernels` makes an environment "
            f"that has, from requirements-kernels.txt"
        )
    return {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent)]),
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_TO": str(dump),
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_SASS": "1",
    }


def run(
    target: str,
    names: Sequence[str],
    *,
    seconds: float,
    on_result: Callable[[Result], object] = lambda _: None,
    command: Sequence[str] = WORKER,
    environment: Callable[[Path], dict[str, str]] = environment_of_worker,
) -> Run:
    """Check rows of a target in as many processes as it takes.

    A process that dies, or says nothing for so many seconds, is to blame on the row it was at; the
    next one goes on behind it.

    Raises:
      RuntimeError: if a process ends before its first row.
    """
    found = Run()
    left = list(names)
    while left:
        before = len(left)
        with tempfile.TemporaryDirectory() as scratch:
            errors, variables = Path(scratch, "errors"), environment(Path(scratch, "dump"))
            for event in _events([*command, target], left, seconds, variables, errors):
                if "versions" in event:
                    found.versions = event["versions"]
                    continue
                faults = tuple(Fault(*fault) for fault in event["faults"])
                result = Result(event["done"], event["facts"], faults, event["seconds"])
                found.results.append(result)
                left.remove(result.name)
                on_result(result)
            if len(left) == before:
                raise RuntimeError(f"no row of {target} was begun: {_last_lines(errors)}")
    return found


def _events(
    command: list[str], names: list[str], seconds: float, variables: dict[str, str], errors: Path
) -> Iterator[dict[str, Any]]:
    """What one process tells of versions and rows; at its death, also of the row it was at."""
    at, since = None, time.monotonic()
    with errors.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            cwd=SCRIPTS,
            env=variables,
        )
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
    try:
        # One that dies at once reads nothing.
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(names), file=process.stdin, flush=True)
        while line := lines.get(timeout=seconds):
            event = json.loads(line)
            if "begin" in event:
                at, since = event["begin"], time.monotonic()
            else:
                at = None
                yield {**event, "seconds": time.monotonic() - since}
        end = f"the process died with status {process.wait()}"
    except queue.Empty:
        end = f"nothing was heard for {seconds:.0f} s"
    finally:
        process.kill()
        process.wait()
    if at is not None:
        text = f"{end}: {_last_lines(errors)}"
        spent = time.monotonic() - since
        yield {"done": at, "facts": {}, "faults": [["died", text]], "seconds": spent}


def _forward(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _last_lines(errors: Path) -> str:
    return " | ".join(errors.read_text(errors="replace").strip().splitlines()[-LAST_LINES:])
