"""Calibration of a model directory on a file, and what it gains on other tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.cache import Scales
from kvjax.engine.calibrate import calibrate, random_tokens, rows
from kvjax.engine.codec_error import CodecError, codec_error
from kvjax.models.cache_scales import save_scales
from kvjax.models.load import find_model, load
from kvjax.nn import Decoder

REPORT_ROW = 256  # tokens of a row that the error is measured on

# A stage, what is done of it, and all there is of it.
type Progress = Callable[[str, int, int], None]


class Calibration(NamedTuple):
    """Scales that were written beside a model, and what a cache with them changes.

    Attributes:
      path: of the file.
      scales: what is in it.
      error: of caches with the scales.
      at_scale_1: of caches without them.
    """

    path: Path
    scales: Scales
    error: CodecError
    at_scale_1: CodecError

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain data, for JSON; the scales themselves are in the file."""
        return {
            "path": str(self.path),
            "codec": self.scales.codec,
            "source": self.scales.source,
            "tokens": self.scales.tokens,
            "percentile": self.scales.percentile,
            "calibrated": self.error.as_dict(),
            "at_scale_1": self.at_scale_1.as_dict(),
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """Name and value of each figure, for a table."""
        of = "largest" if self.scales.percentile is None else f"percentile {self.scales.percentile}"
        yield "scales", f"{self.path}"
        yield "calibrated on", f"{self.scales.tokens:,} tokens of {self.scales.source}, {of}"
        yield "measured on", f"{self.error.tokens:,} tokens"
        yield "KL from an f32 cache", f"{self.error.kl:.3g} nats"
        yield "at scale 1", f"{self.at_scale_1.kl:.3g} nats"
        yield "loss", f"{self.error.f32_loss:.4f} → {self.error.loss:.4f} nats"


def calibrate_model(
    model_dir: str | os.PathLike[str],
    text: str | os.PathLike[str] | None = None,
    *,
    codec: str = "fp8_e4m3_head",
    percentile: float | None = None,
    tokens: int = 16384,
    length: int = 512,
    batch: int = 8,
    report_on: str | os.PathLike[str] | None = None,
    report_tokens: int = 1024,
    seed: int = 0,
    dtype: str | None = None,
    on_progress: Progress = lambda stage, done, total: None,
) -> Calibration:
    """Calibrate a model's cache and write the scales into its directory.

    Args:
      model_dir: a model directory, or the id of a model on the Hub.
      text: a file of text or token ids (`kvjax.train.data.read_tokens`), of which the first
        `tokens` are read; None for random token ids.
      codec, percentile: as in `calibrate`.
      tokens: how many to calibrate on, at most.
      length, batch: tokens of a row that see each other, at most, and rows that are read together.
      report_on: a file whose first `report_tokens` the error is measured on; None for the last
        ones of `text`, or for other random ids.
      report_tokens: their number, at most; in rows of 256, or of `length`, that are decoded side
        by side.
      seed: of random ids.
      dtype: as in `models.load`.
      on_progress: called with a stage, tokens done, and all of them.

    Raises:
      FileNotFoundError: for a model or text that is not there.
      ValueError: naming the argument that does not fit, or the file that is too short.
    """
    for name, value, least in (("tokens", tokens, 1), ("report_tokens", report_tokens, 2)):
        if value < least:
            raise ValueError(f"{name}: got {value}; accepted: {least} and more")
    directory = find_model(model_dir)
    model = load(directory, dtype)
    length = min(length, model.config.max_positions or length)
    if text is None:
        source, batches = "random tokens", random_tokens(model, tokens, length, batch, seed)
        held_out = np.random.default_rng(seed + 1).integers(
            model.config.vocab_size, size=report_tokens
        )
    else:
        ids = _read(text, directory, model)
        tokens = min(tokens, len(ids))
        source, batches = Path(text).name, rows(ids[:tokens], length, batch)
        held_out = ids[-report_tokens:]
    if report_on is not None:
        held_out = _read(report_on, directory, model)[:report_tokens]

    def progress(done: int) -> None:
        on_progress("calibrating", done, tokens)

    scales = calibrate(
        model, batches, codec=codec, percentile=percentile, source=source, progress=progress
    )
    path = save_scales(scales, directory)
    width = min(REPORT_ROW, length, len(held_out))
    ids, count = next(rows(held_out, width, -(-len(held_out) // width)))
    reports: list[CodecError] = []
    for used in (scales, None):
        on_progress("measuring", len(reports), 2)
        reports.append(codec_error(model, ids, scales.codec, scales=used, count=count))
    on_progress("measuring", 2, 2)
    return Calibration(path, scales, *reports)


def _read(path: str | os.PathLike[str], directory: Path, model: Decoder) -> np.ndarray:
    # Here, because kvjax.train brings libraries of training that nothing else here needs.
    from kvjax.train.data import read_tokens

    return np.asarray(read_tokens(path, directory, model.config.vocab_size, at_least=2))
