"""Checks rows of one target, in a process of its own.

    python -m kernel_check.worker TARGET < names.json

Reads a line, a list of names, and writes one for each event: what the compilers are, when a row
begins, and what was found of it. XLA compiles for one kind of GPU in a process, and LLVM ends it
where it cannot select an instruction.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kernel_check import cases
from kernel_check.budgets import Fault
from kernel_check.calls import call, multiplied_by
from kernel_check.checking import Checked, check_call
from kernel_check.negatives import MAKERS
from kernel_check.steps import check_step


def check(row: cases.Row, target: str, dump: Path) -> Checked:
    """What is found of a row."""
    if isinstance(row, cases.Negative):
        # Its figures are those of nothing that is shipped.
        return MAKERS[row.fault](target, dump)._replace(facts={})
    if isinstance(row, cases.StepCase):
        return check_step(row, target)
    with multiplied_by(row.unit):
        return check_call(call(row), target, dump, row.page)


def versions() -> dict[str, str]:
    """Of what the machine code depends on."""
    said = subprocess.run(["ptxas", "--version"], capture_output=True, text=True, check=True)
    return {
        "jax": version("jax"),
        "jax-cuda13-pjrt": version("jax-cuda13-pjrt"),
        "ptxas": said.stdout.split()[-1],
    }


def main() -> None:
    """Check the rows named on standard input."""
    target = sys.argv[1]
    table = {row.name: row for row in cases.rows(target, subset=False)}
    dump = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    # Compilers print what they like: only events go where they are read.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(**event: Any) -> None:
        print(json.dumps(event), file=events, flush=True)

    tell(versions=versions())
    for name in json.loads(sys.stdin.readline()):
        tell(begin=name)
        shutil.rmtree(dump, ignore_errors=True)
        dump.mkdir()
        try:
            found = check(table[name], target, dump)
        except Exception as error:
            # What the compilers refuse is caught below: this is a fault of the checker's.
            found = Checked({}, [Fault("checker", f"{type(error).__name__}: {error}")])
        tell(done=name, facts=found.facts, faults=[[*fault] for fault in found.faults])


if __name__ == "__main__":
    main()
