"""The reviewed figures of each row, kept in the repository, and what differs from them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).resolve().parents[1] / "kernel_baseline.json"
# By how much a figure may change, as a share of it; others not at all.
TOLERANCES = {"registers": 0.1, "loop": 0.1, "step": 0.1, "temporaries": 0.1}


class Difference(NamedTuple):
    """A figure that is not as it was; None where there is none."""

    name: str
    fact: str
    was: Any
    found: Any


class Baseline(NamedTuple):
    """Figures of each row of each target, and the versions of the compilers that gave them."""

    versions: dict[str, str]
    targets: dict[str, dict[str, dict[str, Any]]]


def read(path: Path = PATH) -> Baseline:
    """The baseline; an empty one if there is none yet."""
    if not path.exists():
        return Baseline({}, {})
    data = json.loads(path.read_text())
    return Baseline(data["versions"], data["targets"])


def write(baseline: Baseline, path: Path = PATH) -> None:
    """Whole or not at all, a row a line."""
    targets = []
    for target, rows in sorted(baseline.targets.items()):
        lines = [f'"{name}": {json.dumps(facts)}' for name, facts in sorted(rows.items())]
        targets.append(f'"{target}": {{\n' + ",\n".join(lines) + "\n}")
    text = '{\n"versions": %s,\n"targets": {\n%s\n}\n}\n'
    beside = path.with_suffix(".new")
    beside.write_text(text % (json.dumps(baseline.versions), ",\n".join(targets)))
    beside.rename(path)


def updated(
    old: Baseline,
    target: str,
    versions: dict[str, str],
    facts: Mapping[str, dict[str, Any]],
    known: Collection[str],
) -> Baseline:
    """The baseline with a target's rows replaced by new ones, but for those that were not run.

    Args:
      known: names of all rows of the target; others are dropped.
    """
    kept = {name: row for name, row in old.targets.get(target, {}).items() if name in known}
    return Baseline(versions, {**old.targets, target: {**kept, **facts}})


def differences(
    old: Baseline,
    target: str,
    versions: dict[str, str],
    facts: Mapping[str, dict[str, Any]],
    known: Collection[str],
) -> Iterator[Difference]:
    """What is not as in the baseline, within the tolerances."""
    for name in sorted(versions.keys() | old.versions.keys()):
        if versions.get(name) != old.versions.get(name):
            yield Difference("compilers", name, old.versions.get(name), versions.get(name))
    rows = old.targets.get(target, {})
    for name in sorted(rows.keys() - set(known)):
        yield Difference(name, "row", "in the baseline", "not in the table")
    if new := [name for name in facts if name not in rows]:
        more = f" and {len(new) - 1} more" if len(new) > 1 else ""
        yield Difference(new[0] + more, "row", "not in the baseline", "in the table")
    for name in sorted(facts.keys() & rows.keys()):
        was, found = rows[name], facts[name]
        for fact in sorted(found.keys() | was.keys()):
            if not _alike(fact, was.get(fact), found.get(fact)):
                yield Difference(name, fact, was.get(fact), found.get(fact))


def _alike(fact: str, was: Any, found: Any) -> bool:
    if was is None or found is None or fact not in TOLERANCES:
        return bool(was == found)
    return bool(abs(found - was) <= TOLERANCES[fact] * was)
