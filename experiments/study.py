"""An experiment that needs no model: its command line, its journal and the files it writes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, Setup
from matplotlib.figure import Figure

from kvjax.bench import machine
from kvjax.bench.report import write_whole


@dataclass(frozen=True)
class Study:
    """What is measured on a machine, and how it is shown.

    Attributes:
      name: of the file, and of what it writes.
      title, about: heading, and what is measured and how, for the page.
      measure: gives all figures as plain data.
      page: figures -> the page's parts after `about`, in Markdown.
      draw: figures -> the plot.
    """

    name: str
    title: str
    about: str
    measure: Callable[[Setup], dict[str, Any]]
    page: Callable[[Mapping[str, Any]], Sequence[str]]
    draw: Callable[[Mapping[str, Any]], Figure]

    def main(self, arguments: Sequence[str] | None = None) -> Path:
        """Run as a command; returns the JSON file, whose neighbours are the page and the plot."""
        parser = argparse.ArgumentParser(description=f"{self.title}. {self.about}")
        parser.add_argument("--quick", action="store_true", help="the least that runs all code")
        parser.add_argument(
            "--resume", action="store_true", help="go on with a run that was cut short"
        )
        parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results")
        given = parser.parse_args(arguments)
        given.out.mkdir(parents=True, exist_ok=True)
        journal = given.out / f".{self.name}.partial.json"
        done = json.loads(journal.read_text()) if given.resume and journal.exists() else {}
        # No model, and no text, for the part of the frame that keeps a journal.
        nothing: Any = None
        setup = Setup(ROOT, nothing, nothing, nothing, given.quick, journal, done)
        results = self.measure(setup)
        figures = {
            "experiment": self.name,
            "command": f"python experiments/{self.name}.py" + " --quick" * given.quick,
            "machine": machine.describe(),
            "seconds": round(sum(setup.done[one]["seconds"] for one in setup.used), 1),
            **results,
        }
        written = self.write(figures, given.out)
        journal.unlink(missing_ok=True)
        return written

    def write(self, figures: Mapping[str, Any], directory: Path) -> Path:
        """Write JSON, page and plot; each appears whole or not at all."""
        partial = directory / f".{self.name}.partial.png"
        try:
            self.draw(figures).savefig(partial, dpi=90)
            partial.replace(directory / f"{self.name}.png")
        finally:
            partial.unlink(missing_ok=True)
        parts = [f"# {self.title}", self.about, *self.page(figures)]
        parts.append(f"![{self.title}]({self.name}.png)")
        write_whole(directory / f"{self.name}.md", "\n\n".join(parts) + "\n")
        text = json.dumps(figures, indent=2, allow_nan=False) + "\n"
        return write_whole(directory / f"{self.name}.json", text)
