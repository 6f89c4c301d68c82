"""From a checkpoint directory with MHA, GQA or MQA to one with multi-head latent attention."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np

from kvjax import sizing
from kvjax.convert.compare import (
    Comparison,
    Progress,
    compare,
    evaluation_windows,
    no_progress,
)
from kvjax.convert.mla.layer import Losses, Way
from kvjax.convert.mla.moments import second_moments
from kvjax.convert.mla.report import MlaReport
from kvjax.convert.mla.transmla import TransMla
from kvjax.convert.mla.writer import Prepared, Target, prepare
from kvjax.convert.report import CODEC
from kvjax.convert.source import Model, read
from kvjax.models import kvjax_mla
from kvjax.models.atomic import require_free
from kvjax.models.load import load

type Tokens = str | os.PathLike[str] | None
_DEFAULT = TransMla()


def to_mla(
    src_dir: str | os.PathLike[str],
    dst_dir: str | os.PathLike[str],
    latent_rank: int,
    rope_dim: int,
    way: Way = _DEFAULT,
    *,
    model_type: str = kvjax_mla.MODEL_TYPE,
    seed: int = 0,
    calibrate_on: Tokens = None,
    calibrate_tokens: int = 4096,
    evaluate_on: Tokens | Literal[False] = None,
    evaluate_tokens: int = 512,
    on_progress: Progress = no_progress,
) -> MlaReport:
    """Convert a checkpoint to latent attention: TransMLA's way, or MHA2MLA's.

    Some channels of the keys stay rotated, as `way` says, and those that do not score as if query
    and key were at equal positions; these and the values are then made of one latent of low rank.
    With all channels rotated and the latent at its full rank the result is the same function. The
    factor of the scores, windows and RoPE's scaling stay those of the source. Biases are kept, and
    exact for what is made of them (`kvjax.convert.mla.layer.to_latent`): where q, k and v have
    biases, the output projection has one too, to which those of the values move.

    Args:
      src_dir: a Hugging Face model directory, or the id of a model on the Hub.
      dst_dir: the directory to make: config, weights in the source's dtypes and sharding, and the
        source's tokenizer files. It appears whole or not at all, and kvjax alone loads it.
      latent_rank: L. A token leaves behind L numbers and those of its rope keys.
      rope_dim: R, the channels of each rope key. TransMLA has one for all heads, MHA2MLA one for
        each KV head.
      way: `TransMla` or `Mha2Mla`, with their settings.
      model_type: of the result.
      seed: of the token ids drawn where no file is given.
      calibrate_on: a file of text or token ids (`kvjax.train.data.read_tokens`) on which the inputs
        of the layers are measured, by which the ways choose and the errors are reported; None for
        random token ids, which are a poor stand-in for text. For this the source is in memory in
        float32, and 8 (D + 1)^2 bytes a layer.
      calibrate_tokens: how many of them, at most; several for each of the D channels are needed.
      evaluate_on, evaluate_tokens: as of `kvjax.convert.to_gqa`.
      on_progress: called with a stage, what is done of it and all there is of it.

    Raises:
      FileExistsError: dst_dir exists and is not empty.
      FileNotFoundError: src_dir, one of its shards or a file of tokens is not there.
      ValueError: naming the field, tensor or argument that does not fit.
    """
    require_free(Path(dst_dir).resolve())
    reports = _convert(
        src_dir,
        [(latent_rank, Path(dst_dir))],
        rope_dim,
        way,
        model_type=model_type,
        seed=seed,
        calibrate_on=calibrate_on,
        calibrate_tokens=calibrate_tokens,
        evaluate_on=evaluate_on,
        evaluate_tokens=evaluate_tokens,
        on_progress=on_progress,
    )
    return next(reports)


def mla_ranks(
    src_dir: str | os.PathLike[str],
    latent_ranks: Sequence[int],
    rope_dim: int,
    way: Way = _DEFAULT,
    *,
    model_type: str = kvjax_mla.MODEL_TYPE,
    seed: int = 0,
    calibrate_on: Tokens = None,
    calibrate_tokens: int = 4096,
    evaluate_on: Tokens | Literal[False] = None,
    evaluate_tokens: int = 512,
    on_progress: Progress = no_progress,
) -> tuple[MlaReport, ...]:
    """What `to_mla` would report at each of several ranks; no model is kept.

    Arguments and errors are as there.
    """
    with tempfile.TemporaryDirectory() as work:
        reports = _convert(
            src_dir,
            [(rank, Path(work, str(rank))) for rank in latent_ranks],
            rope_dim,
            way,
            model_type=model_type,
            seed=seed,
            calibrate_on=calibrate_on,
            calibrate_tokens=calibrate_tokens,
            evaluate_on=evaluate_on,
            evaluate_tokens=evaluate_tokens,
            on_progress=on_progress,
        )
        return tuple(reports)


def _convert(
    src_dir: str | os.PathLike[str],
    targets: Sequence[tuple[int, Path]],
    rope_dim: int,
    way: Way,
    *,
    model_type: str,
    seed: int,
    calibrate_on: Tokens,
    calibrate_tokens: int,
    evaluate_on: Tokens | Literal[False],
    evaluate_tokens: int,
    on_progress: Progress,
) -> Iterator[MlaReport]:
    """A report for each rank and directory, as soon as that is written."""
    if model_type != kvjax_mla.MODEL_TYPE:
        raise ValueError(
            f"model_type: got {model_type!r}; accepted: {kvjax_mla.MODEL_TYPE}. Classes of other "
            "libraries, such as deepseek_v3, always norm the latent and have each frequency "
            "once, so that no such directory would be the function that was converted"
        )
    checkpoint, source = read(src_dir)
    for rank, _ in targets:
        _check(source, rank, rope_dim, way)
    directory, windows = checkpoint.directory, None
    if evaluate_on is not False:
        windows = evaluation_windows(directory, evaluate_on, evaluate_tokens, seed)
    # Random tokens other than those to compare on.
    calibration = evaluation_windows(directory, calibrate_on, calibrate_tokens, seed + 1)
    moments = second_moments(load(directory, "f32"), calibration, on_progress)
    prepared = prepare(checkpoint, source, way, rope_dim, moments)
    for rank, dst_dir in targets:
        target = prepared.target(rank)
        losses = prepared.write(target, dst_dir, on_progress)
        comparison = None
        if windows is not None:
            is_text = evaluate_on is not None
            comparison = compare(directory, dst_dir, windows, is_text, on_progress)
        yield _report(prepared, target, losses, seed, calibration.size, comparison)


def _check(source: Model, rank: int, rope_dim: int, way: Way) -> None:
    """ValueError unless the layers can be converted, and so."""
    for index, layer in enumerate(source.decoder.attention):
        attention = kvjax_mla.convertible(index, layer)
        assert attention.rope is not None  # or it could not be converted
        heads = attention.kv_heads
        way.check(rope_dim, heads, attention.rope.dim)
        width = attention.key_dim + attention.value_dim
        most = heads * width - way.rope_heads(heads) * rope_dim
        if not 1 <= rank <= most:
            raise ValueError(
                f"latent_rank: got {rank}; accepted: 1 to {most}, the channels of all keys and "
                f"values that do not stay rotated"
            )


def _report(
    prepared: Prepared,
    target: Target,
    losses: Sequence[Losses],
    seed: int,
    calibration_tokens: int,
    comparison: Comparison | None,
) -> MlaReport:
    source, config = prepared.source, target.config
    key_error, value_error, rope_energy = np.mean(losses, axis=0).tolist()
    return MlaReport(
        model_type=config["model_type"],
        source_model_type=config["source_model_type"],
        way=prepared.way.name,
        settings=asdict(prepared.way),
        latent_rank=target.rank,
        rope_heads=config["rope_heads"],
        rope_dim=prepared.rope_dim,
        seed=seed,
        calibration_tokens=calibration_tokens,
        key_error=key_error,
        value_error=value_error,
        rope_energy=rope_energy,
        bytes_per_token_before=sizing.load(source.config).bytes_per_token(CODEC),
        bytes_per_token_after=sizing.load(config).bytes_per_token(CODEC),
        parameters_before=source.parameters,
        parameters_after=target.parameters,
        comparison=comparison,
    )
