"""Uptraining of a checkpoint (arXiv:2305.13245, section 2.1): directory to directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from kvjax.models import load, save
from kvjax.models.atomic import atomic_directory, require_free
from kvjax.models.checkpoint import copy_side_files
from kvjax.models.load import find_model
from kvjax.nn import Decoder
from kvjax.train.config import UptrainConfig
from kvjax.train.data import read_tokens
from kvjax.train.evaluate import held_out_loss
from kvjax.train.loop import Metrics, train
from kvjax.train.metrics import MetricsFile
from kvjax.train.step import cast


@dataclass(frozen=True)
class UptrainReport:
    """What came of a run.

    Attributes:
      directory: the model that was written.
      steps, tokens: of the whole run, the part before a resume included.
      seconds: of this call.
      held_out_before, held_out_after: loss on the held-out file, nats per token, computed in
        compute_dtype; None without such a file.
    """

    directory: str
    steps: int
    tokens: int
    seconds: float
    held_out_before: float | None
    held_out_after: float | None


def uptrain(
    src_dir: str | os.PathLike[str],
    dst_dir: str | os.PathLike[str],
    data_path: str | os.PathLike[str],
    config: UptrainConfig,
    *,
    held_out_path: str | os.PathLike[str] | None = None,
    teacher_dir: str | os.PathLike[str] | None = None,
    work_dir: str | os.PathLike[str] | None = None,
    save_every: int = 100,
    resume: bool = False,
    reset_optimizer: bool = False,
    mesh: Mesh | None = None,
    on_step: Callable[[Metrics], None] | None = None,
) -> UptrainReport:
    """Train the model of a directory further on a file, and write the result as such a directory.

    Args:
      src_dir: a Hugging Face model directory, such as `kvjax.convert` writes.
      dst_dir: the directory to make, in the dtypes of src_dir and with its tokenizer files; it
        appears whole or not at all.
      data_path: text or token ids (`kvjax.train.data.read_tokens`).
      config: the run.
      held_out_path: text or token ids to evaluate on before and after.
      teacher_dir: a model to distil from, usually the one that src_dir was converted from.
      work_dir: where checkpoints and metrics.jsonl go, dst_dir + ".train" by default. It stays
        when the run is done, and may then be deleted.
      save_every, resume, reset_optimizer, mesh, on_step: see `kvjax.train.train`.

    Raises:
      FileExistsError: dst_dir is not empty, or work_dir has checkpoints and resume is False.
      FileNotFoundError: a file or a directory that is not there.
      ValueError: settings, data or checkpoints that do not fit each other (`train`, `read_tokens`).
    """
    start = time.perf_counter()
    dst = Path(dst_dir).resolve()
    require_free(dst)
    src = find_model(src_dir)
    model = load(src, mesh=mesh)
    vocab_size = model.config.vocab_size
    tokens = read_tokens(data_path, src, vocab_size, at_least=config.seq_len + 1)
    held_out = None
    if held_out_path is not None:
        held_out = read_tokens(held_out_path, src, vocab_size, at_least=2)
    teacher = None if teacher_dir is None else load(teacher_dir, config.compute_dtype, mesh)

    work = Path(f"{dst}.train" if work_dir is None else work_dir)
    metrics_file = MetricsFile(work / "metrics.jsonl")

    def record(metrics: Metrics) -> None:
        metrics_file(metrics)
        if on_step is not None:
            on_step(metrics)

    trained = train(
        model,
        tokens,
        config,
        teacher=teacher,
        mesh=mesh,
        checkpoint_dir=work / "checkpoints",
        save_every=save_every,
        resume=resume,
        reset_optimizer=reset_optimizer,
        on_step=record,
    )
    result = jax.tree.map(lambda new, old: new.astype(old.dtype), trained, model)
    _write(result, src, dst)

    def evaluate(model: Decoder) -> float | None:
        if held_out is None:
            return None
        model = cast(model, config.compute_dtype)
        return held_out_loss(model, held_out, config.seq_len, config.batch // config.accumulate)

    return UptrainReport(
        directory=str(dst),
        steps=config.total_steps,
        tokens=config.total_steps * config.tokens_per_step,
        seconds=time.perf_counter() - start,
        held_out_before=evaluate(model),
        held_out_after=evaluate(result),
    )


def _write(model: Decoder, src: Path, dst: Path) -> None:
    """Save the model with the side files of src, as a directory that appears whole."""
    with atomic_directory(dst) as whole:
        save(model, whole)
        copy_side_files(src, whole)
