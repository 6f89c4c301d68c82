"""Compile every kernel for GPUs that are not there, and hold the machine code to budgets.

    make check-kernels                        # all targets, in an environment of its own
    make check-kernels TARGET=h100 SUBSET=1
    python scripts/check_kernels.py --list
    python scripts/check_kernels.py --target h100 --only 'e4m3.*G71'
    python scripts/check_kernels.py --update  # then review the difference in git

Each row of a table (kernel_check/cases.py) calls the library's own function on arrays that are only
described, compiles what it launches to SASS, and checks it against

- budgets (kernel_check/budgets.py): no spills; registers and shared memory for as many blocks on a
  multiprocessor as the plan means; the matrix instructions that the shapes ask for; tiles copied by
  the copy engine alone, each byte once; a proxy fence on every way from a store to a read past it;
  no array as large as a cache made beside the kernel; temporaries;
- the figures in kernel_baseline.json, which a person has reviewed.

Rows that must fail show that the checks can. Needs jax, its CUDA plugin, ptxas and nvdisasm
(requirements-kernels.txt), but no GPU and no driver. Ends with status 1 if anything fails.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kernel_check import baseline, cases
from kernel_check.running import Result, Run, run
from kernel_check.targets import TARGETS

# Within which a row must be heard of.
SECONDS = 180.0


class Checked(NamedTuple):
    """A target's rows, what was found of them, and what is wrong with those that do not pass."""

    rows: list[cases.Row]
    run: Run
    wrong: dict[str, list[str]]
    seconds: float

    @property
    def facts(self) -> dict[str, dict[str, Any]]:
        """Figures of the rows that pass."""
        results = self.run.results
        return {r.name: r.facts for r in results if r.facts and r.name not in self.wrong}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what the arguments name; 0 if all is well."""
    options = _options(arguments)
    targets = options.target or [*TARGETS]
    if options.list:
        for target in targets:
            rows = chosen(target, options)
            print(f"{target}: {len(rows)} rows", *(f"  {row.name}" for row in rows), sep="\n")
        return 0
    figures, reports, failed = baseline.read(), {}, False
    with ThreadPoolExecutor(options.jobs) as pool:
        found = pool.map(lambda target: check(target, chosen(target, options)), targets)
        for target, checked in zip(targets, found, strict=True):
            known = {row.name for row in cases.rows(target, subset=False)}
            given = target, checked.run.versions, checked.facts, known
            if options.update:
                figures = baseline.updated(figures, *given)
                baseline.write(figures)
            differing = [*baseline.differences(figures, *given)]
            _print(target, checked, differing)
            failed |= bool(checked.wrong or differing)
            reports[target] = _report(checked, differing)
    if options.json:
        options.json.write_text(json.dumps(reports, indent=1) + "\n")
    return int(failed)


def chosen(target: str, options: argparse.Namespace) -> list[cases.Row]:
    """The rows that were asked for."""
    rows = cases.rows(target, subset=options.subset)
    return [row for row in rows if re.search(options.only, row.name)]


def check(target: str, rows: list[cases.Row]) -> Checked:
    """Run rows of a target."""
    begin = time.monotonic()
    found = run(target, [row.name for row in rows], seconds=SECONDS, on_result=_progress)
    return Checked(rows, found, judged(rows, found.results), time.monotonic() - begin)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", action="append", choices=TARGETS, help="may be given again; all if not given"
    )
    parser.add_argument(
        "--subset", action="store_true", help="fewer rows, in which every pair of settings is"
    )
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="only rows with names that match"
    )
    parser.add_argument("--update", action="store_true", help="write kernel_baseline.json")
    parser.add_argument("--list", action="store_true", help="print the rows and compile nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was found")
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="targets at once; 2 if not given"
    )
    return parser.parse_args(arguments)


def judged(rows: Iterable[cases.Row], results: Iterable[Result]) -> dict[str, list[str]]:
    """What is wrong with each row that does not pass.

    A row that must fail passes if it has the fault that it was made with.
    """
    found = {result.name: result for result in results}
    wrong: dict[str, list[str]] = {}
    for row in rows:
        faults = found[row.name].faults
        texts = [f"{fault.kind}: {fault.text}" for fault in faults]
        if isinstance(row, cases.Negative):
            meant = [f for f in faults if f.kind in row.kinds and re.search(row.says, f.text)]
            if not meant:
                said = f"no fault of kind {' or '.join(row.kinds)} that says {row.says!r} was found"
                wrong[row.name] = [said, *texts]
        elif texts:
            wrong[row.name] = texts
    return wrong


def _progress(result: Result) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K  {result.name}", end="", file=sys.stderr, flush=True)


def _print(target: str, checked: Checked, differing: Sequence[baseline.Difference]) -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    passed = len(checked.rows) - len(checked.wrong)
    print(f"{target}: {passed} of {len(checked.rows)} rows pass, in {checked.seconds:.0f} s")
    for name, texts in checked.wrong.items():
        print(f"  FAIL  {name}", *(f"          {text}" for text in texts), sep="\n")
    if differing:
        print(
            "  Not as in kernel_baseline.json; if that is meant, --update it and review it in git:"
        )
        table = [("row", "figure", "baseline", "now")]
        table += [(d.name, d.fact, _shown(d.was), _shown(d.found)) for d in differing]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for line in table:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            print("    " + "  ".join(cells).rstrip())
    sys.stdout.flush()


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{many} {code}" for code, many in value.items())
    return "none" if value is None else str(value)


def _report(checked: Checked, differing: Sequence[baseline.Difference]) -> dict[str, Any]:
    """All that was found on a target, as JSON has it."""
    rows = {
        result.name: {
            "passed": result.name not in checked.wrong,
            "seconds": round(result.seconds, 1),
            "facts": result.facts,
            "faults": [fault._asdict() for fault in result.faults],
        }
        for result in checked.run.results
    }
    return {
        "versions": checked.run.versions,
        "rows": rows,
        "differences": [difference._asdict() for difference in differing],
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(f"check_kernels: {error}")
