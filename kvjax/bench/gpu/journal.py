"""A file of results, one JSON object a line, each there as soon as it is known.

Whoever writes names each case before it begins and after it has ended, so that whoever reads knows
where a process was when it hung or died.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

type Entry = dict[str, Any]

# Kinds of entries: a case begins, ends, and was lost with the process that ran it.
BEGIN, END, LOST = "begin", "end", "lost"


@dataclass(frozen=True)
class Journal:
    """The entries of a file, which may be written by one process and read by another."""

    path: Path

    def write(self, kind: str, **fields: Any) -> None:
        """Append an entry of that kind."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def entries(self) -> list[Entry]:
        """All that are whole; the last line may still be written."""
        if not self.path.exists():
            return []
        lines = self.path.read_text("utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def of(self, kind: str) -> list[Entry]:
        """The entries of that kind."""
        return [entry for entry in self.entries() if entry["kind"] == kind]

    def begun(self) -> set[str]:
        """Names of the cases that were begun, whatever became of them."""
        return {entry["name"] for entry in self.of(BEGIN)}

    @contextmanager
    def case(self, name: str, **about: Any) -> Iterator[None]:
        """Around what belongs to a case; one that raises ends, too."""
        self.write(BEGIN, name=name, **about)
        try:
            yield
        finally:
            self.write(END, name=name)

    def lose(self, reason: str) -> None:
        """Say of the case that has begun and not ended that it is lost, and why."""
        entries = self.entries()
        over = {entry["name"] for entry in entries if entry["kind"] in (END, LOST)}
        begun = [e for e in entries if e["kind"] == BEGIN and e["name"] not in over]
        about = begun[-1] if begun else {"name": "between cases"}
        self.write(**{**about, "kind": LOST, "reason": reason})
