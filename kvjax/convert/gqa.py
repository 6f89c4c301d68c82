"""From a checkpoint directory to one with fewer KV heads (GQA, MQA), or with all of them (MHA).

Tensors stream from the source's files into the new ones, one at a time in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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
from kvjax.convert.pool import METHODS, check_kv_heads, pool_heads, tensor_rng
from kvjax.convert.report import CODEC, ConversionReport
from kvjax.convert.source import Model, bind, read
from kvjax.models.atomic import require_free
from kvjax.models.checkpoint import Checkpoint, CheckpointWriter, TensorSpec, copy_side_files
from kvjax.models.family import Binding
from kvjax.models.registry import FAMILIES
from kvjax.nn import AttentionConfig

# x (..., heads * H), heads, new heads, the tensor's path -> (..., new heads * H)
type _ChangeHeads = Callable[[np.ndarray, int, int, str], np.ndarray]

_MEAN_OF_NORMED_KEYS = (
    "Keys are normed after they are pooled, and the RMSNorm of a mean of keys is not the mean of "
    "their RMSNorms. The scale of k_norm, which all heads share, is kept."
)
_NORM_OVER_FEWER_HEADS = (
    "The RMSNorm of keys takes its mean square over the channels of fewer heads. The scale of "
    "k_norm is pooled like the keys."
)


def to_gqa(
    src_dir: str | os.PathLike[str],
    dst_dir: str | os.PathLike[str],
    kv_heads: int,
    method: str = "mean",
    *,
    seed: int = 0,
    allow_kvjax_only: bool = False,
    evaluate_on: str | os.PathLike[str] | Literal[False] | None = None,
    evaluate_tokens: int = 512,
    on_progress: Progress = no_progress,
) -> ConversionReport:
    """Pool the KV heads of a checkpoint into fewer (arXiv:2305.13245, section 2.1).

    New KV head j replaces the g consecutive ones from j*g on, in kernels and biases of k and v.
    Queries and outputs stay as they are. A k_norm scale that all heads share stays (Qwen3), one
    of full width is pooled like the keys (OLMo-2); the report says what either approximates.

    Args:
      src_dir: a Hugging Face model directory, or the id of a model on the Hub.
      dst_dir: the directory to make: config, weights in the source's dtypes and sharding, and the
        source's tokenizer files. It appears whole or not at all.
      kv_heads: K of the new model, a divisor of the source's.
      method: "mean" (summed in float64); "first" head of each group; or "random", normal with the
        standard deviation of the source's tensor (norms: mean). The last two are baselines.
      seed: of "random", and of the token ids drawn to compare the models on.
      allow_kvjax_only: where the family's config cannot express fewer KV heads (GPT-2, GPT-NeoX),
        write a directory that this library alone loads, marked so by its model_type.
      evaluate_on: a file of text or token ids (`kvjax.train.data.read_tokens`) to compare the two
        models on; None for random token ids; False for no comparison.
      evaluate_tokens: how many tokens are compared, at most. Beside one model in float32 the
        comparison holds 4 bytes for each of them and each word of the vocabulary.
      on_progress: called with a stage, what is done of it and all there is of it.

    Raises:
      FileExistsError: dst_dir exists and is not empty.
      FileNotFoundError: src_dir, one of its shards or the file to compare on is not there.
      ValueError: naming the field, tensor or argument that does not fit.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r}: accepted are {', '.join(METHODS)}")
    require_free(Path(dst_dir).resolve())
    checkpoint, source = read(src_dir)
    check_kv_heads(kv_heads, source.attention.kv_heads)
    target = _with_kv_heads(source, kv_heads, allow_kvjax_only)
    windows = None
    if evaluate_on is not False:
        windows = evaluation_windows(checkpoint.directory, evaluate_on, evaluate_tokens, seed)

    def pool(x: np.ndarray, heads: int, new_heads: int, path: str) -> np.ndarray:
        # Norms, unlike projections, do not start at random.
        how = "mean" if method == "random" and ".k_norm." in path else method
        return pool_heads(x, heads, new_heads, how, tensor_rng(seed, path))

    _write(checkpoint, source, target, dst_dir, pool, on_progress)
    comparison = None
    if windows is not None:
        is_text = evaluate_on is not None
        comparison = compare(checkpoint.directory, dst_dir, windows, is_text, on_progress)
    return _report(source, target, method, seed, comparison)


def to_mha(
    src_dir: str | os.PathLike[str],
    dst_dir: str | os.PathLike[str],
    *,
    on_progress: Progress = no_progress,
) -> ConversionReport:
    """Write each KV head out once for every query head that reads it: the same function, as MHA.

    `to_gqa` turns the result back into the source, bit for bit. Arguments and errors are as there.
    """
    require_free(Path(dst_dir).resolve())
    checkpoint, source = read(src_dir)
    target = _with_kv_heads(source, source.attention.query_heads, allow_kvjax_only=False)
    _write(checkpoint, source, target, dst_dir, _repeat_heads, on_progress)
    return _report(source, target, "repeat", 0, None)


def _with_kv_heads(source: Model, kv_heads: int, allow_kvjax_only: bool) -> Model:
    """The source with another K, as far as its family can express that."""
    if kv_heads == source.attention.kv_heads:
        return source
    config = dict(source.config)
    model_type = config["model_type"]
    field = FAMILIES[model_type].kv_heads_field
    if field is None:
        if not allow_kvjax_only:
            raise ValueError(
                f"model_type={model_type!r} has no config field for the number of KV heads, so "
                "transformers could not load the result; allow_kvjax_only (--allow-kvjax-only) "
                "writes a directory that kvjax alone loads"
            )
        config["model_type"] = f"kvjax_{model_type}"
        config.pop("architectures", None)
        field = "num_key_value_heads"  # in all these forms
    config[field] = kv_heads
    return bind(config, tuple(source.bindings))


def _write(
    checkpoint: Checkpoint,
    source: Model,
    target: Model,
    dst_dir: str | os.PathLike[str],
    change_heads: _ChangeHeads,
    on_progress: Progress,
) -> None:
    """Stream the tensors into dst_dir, those with KV heads through change_heads."""
    plan = [[_planned(spec, target) for spec in shard] for shard in checkpoint.shards]
    specs = [spec for shard in checkpoint.shards for spec in shard]
    total, done = sum(spec.nbytes for spec in specs), 0

    def converted(name: str) -> np.ndarray:
        values = checkpoint.view(name)
        if name not in source.bindings:  # a buffer that no parameter stands for
            return values
        return _convert(values, source.bindings[name], target.bindings[name], change_heads)

    with CheckpointWriter(dst_dir, plan, target.config) as writer:
        for spec in specs:
            writer.write(spec.name, converted(spec.name))
            done += spec.nbytes
            on_progress("converting", done, total)
        copy_side_files(checkpoint.directory, writer.directory)


def _planned(spec: TensorSpec, target: Model) -> TensorSpec:
    binding = target.bindings.get(spec.name)
    return spec if binding is None else spec._replace(shape=binding.shape)


def _convert(
    stored: np.ndarray, old: Binding, new: Binding, change_heads: _ChangeHeads
) -> np.ndarray:
    """A stored tensor for the target. Only those that hold KV heads have another shape there."""
    if old.shape == new.shape:
        return stored
    # The tensor is a layer's, and the layers have KV heads.
    assert isinstance(old.attention, AttentionConfig)
    assert isinstance(new.attention, AttentionConfig)
    heads, new_heads = old.attention.kv_heads, new.attention.kv_heads
    parameter = old.layout.read(stored, old.attention)
    if ".qkv." in old.path:
        q, k, v = np.split(parameter, np.cumsum(old.attention.qkv_widths)[:2], axis=-1)
        k = change_heads(k, heads, new_heads, f"{old.path}.k")
        v = change_heads(v, heads, new_heads, f"{old.path}.v")
        parameter = np.concatenate([q, k, v], axis=-1)
    else:
        parameter = change_heads(parameter, heads, new_heads, old.path)
    converted = np.empty(new.shape, stored.dtype)
    new.layout.write(parameter, new.attention, converted)
    return converted


def _repeat_heads(x: np.ndarray, heads: int, new_heads: int, path: str) -> np.ndarray:
    *lead, width = x.shape
    repeated = np.repeat(x.reshape(*lead, heads, width // heads), new_heads // heads, axis=-2)
    return repeated.reshape(*lead, -1)


def _report(
    source: Model, target: Model, method: str, seed: int, comparison: Comparison | None
) -> ConversionReport:
    before, after = sizing.load(source.config), sizing.load(target.config)
    return ConversionReport(
        model_type=target.config["model_type"],
        kv_heads_before=source.attention.kv_heads,
        kv_heads_after=target.attention.kv_heads,
        method=method,
        seed=seed,
        bytes_per_token_before=before.bytes_per_token(CODEC),
        bytes_per_token_after=after.bytes_per_token(CODEC),
        parameters_before=source.parameters,
        parameters_after=target.parameters,
        approximations=_approximations(source.attention, target.attention, method),
        comparison=comparison,
    )


def _approximations(old: AttentionConfig, new: AttentionConfig, method: str) -> tuple[str, ...]:
    """What pooling approximates beside the heads themselves."""
    if new.kv_heads >= old.kv_heads:
        return ()
    if old.qk_norm == "full":
        return (_NORM_OVER_FEWER_HEADS,)
    if old.qk_norm == "head" and method == "mean":
        return (_MEAN_OF_NORMED_KEYS,)
    return ()
