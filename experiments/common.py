"""What the experiments share: command line, model and text, and the files they write."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kvjax import models
from kvjax.bench import machine
from kvjax.bench.report import write_whole
from kvjax.cache import Cache
from kvjax.demo.presets import HELD_OUT_TEXT, PRESETS, TRAIN_TEXT
from kvjax.engine import Scores, prefill, score
from kvjax.nn import Decoder
from kvjax.train.data import read_tokens

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
MODELS = ROOT / "demo_report" / "models"  # where `make smollm2` keeps its source model


@dataclass(frozen=True)
class Setup:
    """What a run has to go by.

    Attributes:
      directory: of the model and its tokenizer.
      model: in f32, so that only the cache is lossy.
      text: (n,) int32 token ids of the held-out text, in its own order.
      other_text: (m,) of another text, to calibrate on.
      quick: whether to run the least that passes through all of the code.
      journal: file that holds each measurement as soon as it is there.
      done: the measurements that it holds, by name.
      used: names of those that this run asked for.
    """

    directory: Path
    model: Decoder
    text: np.ndarray
    other_text: np.ndarray
    quick: bool
    journal: Path
    done: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def measured(
        self, name: str, measure: Callable[..., dict[str, Any]], *given: Any
    ) -> dict[str, Any]:
        """What measure(*given) gives, its name and seconds; from the journal, if it is there."""
        self.used.add(name)
        if name not in self.done:
            start = time.perf_counter(), time.process_time()
            figures = measure(*given)
            self.done[name] = {
                "name": name,
                **figures,
                "seconds": round(time.perf_counter() - start[0], 1),
                "cpu_seconds": round(time.process_time() - start[1], 1),
            }
            write_whole(self.journal, json.dumps(self.done))
            shown = (f"{key} {x:.5g}" for key, x in self.done[name].items() if type(x) is float)
            print(f"{name}: {', '.join(shown)}", file=sys.stderr, flush=True)
        return self.done[name]

    def result(self, name: str) -> dict[str, Any] | None:
        """What another experiment has written to the same directory, of the same model."""
        path = self.journal.with_name(f"{name}.json")
        found = json.loads(path.read_text("utf-8")) if path.exists() else None
        return found if found is not None and found["model"] == self.directory.name else None

    def rows(self, count: int, tokens: int) -> np.ndarray:
        """(count, tokens) ids: stretches of the text, evenly spaced, that do not overlap.

        Raises:
          ValueError: the text is too short.
        """
        if count * tokens > len(self.text):
            raise ValueError(
                f"rows: got {count} of {tokens} tokens; accepted: up to the {len(self.text)} "
                f"tokens of the text"
            )
        starts = np.arange(count) * (len(self.text) // count)
        return self.text[starts[:, None] + np.arange(tokens)]


@dataclass(frozen=True)
class Decoding:
    """Texts read in chunks, then decoded token by token, through one cache.

    Attributes:
      rows: B.
      prefill, steps: tokens of a row that are read in chunks, and that are predicted after them.
      chunk: tokens of a row in a chunk; divides `prefill`.
    """

    rows: int = 4
    prefill: int = 1024
    steps: int = 128
    chunk: int = 256

    @property
    def capacity(self) -> int:
        """Tokens a row that a cache is to hold."""
        return self.prefill + self.steps

    def filled(self, setup: Setup, cache: Cache) -> Cache:
        """The cache after the chunks."""
        count = np.full(self.rows, self.chunk, np.int32)
        text = self.text(setup)
        for start in range(0, self.prefill, self.chunk):
            _, cache = prefill(setup.model, text[:, start : start + self.chunk], cache, count)
        cache.check()
        return cache

    def decoded(
        self, setup: Setup, cache: Cache, reference: Scores | None = None
    ) -> tuple[Scores, Cache]:
        """Scores of the tokens after the chunks, one a step, and the cache after them."""
        text = self.text(setup)[:, self.prefill :]
        return score(setup.model, text, cache, chunk=1, reference=reference)

    def exact(self, setup: Setup) -> Scores:
        """Scores through a cache that holds all, in f32."""
        cache = setup.model.init_cache(self.rows, self.capacity, "dense", "f32")
        return self.decoded(setup, self.filled(setup, cache))[0]

    def figures(self, scores: Scores, exact: Scores, cache: Cache) -> dict[str, Any]:
        """What a cache costs and changes, as plain data."""
        same = np.mean(scores.likeliest == exact.likeliest)
        return {
            "cache_bytes_per_row": cache.nbytes / self.rows,
            "bytes_per_token": cache.nbytes / self.rows / self.capacity,
            "kl": 0.0 if scores.kl is None else scores.divergence,
            "kl_standard_error": 0.0
            if scores.kl is None
            else float(scores.kl.std() / scores.kl.size**0.5),
            "loss": scores.loss,
            "same_likeliest": float(same),
        }

    def text(self, setup: Setup) -> np.ndarray:
        """(B, T) ids: what is prefilled, what is decoded, and one more to predict."""
        return setup.rows(self.rows, self.capacity + 1)


QUICK = Decoding(rows=2, prefill=64, steps=8, chunk=32)


@dataclass(frozen=True)
class Experiment:
    """A published table or figure, and how it is made again.

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
        given = self._arguments(arguments)
        directory = (given.model or _prepared()).resolve()
        model = models.load(directory, dtype="f32")
        text, other_text = (
            np.asarray(read_tokens(path, directory, model.config.vocab_size, 2))
            for path in (HELD_OUT_TEXT, TRAIN_TEXT)
        )
        given.out.mkdir(parents=True, exist_ok=True)
        journal = given.out / f".{self.name}.partial.json"
        done = json.loads(journal.read_text()) if given.resume and journal.exists() else {}
        setup = Setup(directory, model, text, other_text, given.quick, journal, done)
        results = self.measure(setup)
        figures = {
            "experiment": self.name,
            "command": f"python experiments/{self.name}.py"
            + (f" --model {directory.name}" if given.model else "")
            + " --quick" * given.quick,
            "model": directory.name,
            "layers": len(model.config.attention),
            "text": HELD_OUT_TEXT.relative_to(ROOT).as_posix(),
            "machine": machine.describe(),
            **{
                name: round(sum(setup.done[one][name] for one in setup.used), 1)
                for name in ("seconds", "cpu_seconds")
            },
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
        parts = [f"# {self.title}", self.about, *self.page(figures), *notes(figures)]
        parts.append(f"![{self.title}]({self.name}.png)")
        write_whole(directory / f"{self.name}.md", "\n\n".join(parts) + "\n")
        return write_whole(
            directory / f"{self.name}.json", json.dumps(figures, indent=2, allow_nan=False) + "\n"
        )

    def _arguments(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=f"{self.title}. {self.about}")
        parser.add_argument(
            "--model", type=Path, help="model directory; SmolLM2 of `make smollm2` by default"
        )
        parser.add_argument("--quick", action="store_true", help="the least that runs all code")
        parser.add_argument(
            "--resume", action="store_true", help="go on with a run that was cut short"
        )
        parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results")
        return parser.parse_args(arguments)


def notes(figures: Mapping[str, Any]) -> list[str]:
    """On what a run was measured, as sentences."""
    where = figures["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    return [
        f"Measured with {figures['model']} ({figures['layers']} layers, f32) on "
        f"`{figures['text']}` by `{figures['command']}`: {figures['seconds']:,.0f} seconds, "
        f"{figures['cpu_seconds']:,.0f} of the processors', on {where['backend']} "
        f"({where['cpu']}, {where['threads']} threads, load {where['load_average']}); {versions}."
    ]


def _prepared() -> Path:
    MODELS.mkdir(parents=True, exist_ok=True)
    return PRESETS["smollm2"].prepare(MODELS)
