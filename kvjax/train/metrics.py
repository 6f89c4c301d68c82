"""What is seen of a run: a JSONL file and a progress bar. Both take the metrics of each step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


class MetricsFile:
    """One JSON object a line and step.

    Lines of the first step that comes, or of later ones, were written by a run that was stopped
    after its last checkpoint; they are replaced.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._trimmed = False

    def __call__(self, metrics: dict[str, float]) -> None:
        if not self._trimmed:
            self._trim(metrics["step"])
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    def _trim(self, step: float) -> None:
        text = self.path.read_text("utf-8") if self.path.exists() else ""
        complete = text[: text.rfind("\n") + 1].splitlines()
        kept = [line for line in complete if json.loads(line)["step"] < step]
        self.path.write_text("".join(line + "\n" for line in kept), "utf-8")
        self._trimmed = True


class ProgressBar:
    """Steps, loss, tokens/s and the time left, on standard error; for a `with` block."""

    def __init__(self, steps: int):
        self._steps = steps
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, metrics: dict[str, float]) -> None:
        step = int(metrics["step"])
        if self._task is None:
            # A resumed run starts in the middle; the time left is estimated from there.
            self._task = self._progress.add_task("", total=self._steps, completed=step - 1)
        shown = f"loss {metrics['loss']:.3f}  {metrics['tokens_per_second']:,.0f} tokens/s"
        self._progress.update(self._task, completed=step, description=shown)
