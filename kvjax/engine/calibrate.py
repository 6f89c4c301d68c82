"""Calibration of 8-bit float caches: scales from what a model really writes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from kvjax.cache.scales import LayerScales, Scales, static_codec
from kvjax.nn import Decoder
from kvjax.nn.watch import projections

# Tokens (B, T), right-padded, and the real ones of each row; or tokens alone, all of them real.
type Batch = tuple[ArrayLike, ArrayLike] | ArrayLike

_FIELDS = ("q_scale", "k_scale", "v_scale")


def calibrate(
    model: Decoder,
    batches: Iterable[Batch],
    *,
    codec: str,
    percentile: float | None = None,
    source: str = "data set",
    progress: Callable[[int], None] | None = None,
) -> Scales:
    """Scales for a model's caches, from texts that it reads without a cache.

    A token's amax is the largest |x| of its keys (after norms and rotation), values or queries, in
    one head, or of keys and values in all of them where the codec has a scale a tensor. A layer's
    amax is the largest over all tokens of all batches, or a percentile of the tokens', and the
    scale is amax / the largest finite number of the format: 448 of e4m3, 57344 of e5m2. What is
    larger than amax later on is stored as amax.

    Args:
      model: a decoder whose layers are `nn.Attention`. One that reads another's keys and values
        gets no scales.
      batches: tokens (B, T) integers, right-padded, with count (B,), the real ones of each row; or
        tokens alone. Padding counts for nothing. Each shape is compiled once.
      codec: fp8_e4m3, fp8_e5m2 or fp8_e4m3_head. fp8_e4m3_token and int8 need no calibration: they
        scale each token by its own numbers as it is written.
      percentile: 0 to 100, as in `numpy.percentile`, which needs 4 bytes a token and scale until
        all tokens are seen; None for the largest.
      source: what the batches are, as the scales are to say.
      progress: called after each batch with the number of tokens so far.

    Raises:
      ValueError: for a codec without such scales, a percentile out of range, batches without a
        token or with ids outside the vocabulary, or a layer's numbers that are not finite.
    """
    static = static_codec(codec)
    if percentile is not None and not 0 <= percentile <= 100:
        raise ValueError(f"percentile: got {percentile}; accepted: 0 to 100, or None")
    amax: list[np.ndarray] = []  # (tokens, M): of all tokens, or the largest of them alone
    tokens = 0
    for batch in batches:
        ids, count = check_batch(model, batch)
        real = np.arange(ids.shape[1]) < count[:, None]
        amax.append(np.asarray(_amax(model, ids, count, static.per_head))[real])
        _check_finite(model, amax[-1], static.per_head)
        if percentile is None:
            amax = [np.concatenate(amax).max(axis=0, initial=0, keepdims=True)]
        tokens += len(real[real])
        if progress is not None:
            progress(tokens)
    if not tokens:
        raise ValueError("batches: got no tokens; accepted: at least 1")
    every = np.concatenate(amax)
    chosen = every[0] if percentile is None else np.percentile(every, percentile, axis=0)
    scales = _split(model, _scale(chosen, static.largest), static.per_head)
    layers = tuple(None if x is None else _of_layer(x, static.per_head) for x in scales)
    return Scales(static.name, layers, source, tokens, percentile)


def random_tokens(
    model: Decoder, tokens: int, length: int = 512, batch: int = 8, seed: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of ids drawn evenly from the vocabulary, for `calibrate` where there is no text."""
    ids = np.random.default_rng(seed).integers(model.config.vocab_size, size=tokens)
    return rows(ids, length, batch)


def rows(
    tokens: np.ndarray, length: int = 512, batch: int = 8
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A stream of tokens (n,) cut into batches (batch, length) of rows, the last ones padded."""
    for name, value in (("length", length), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name}: got {value}; accepted: 1 and more")
    size = length * batch
    for start in range(0, len(tokens), size):
        piece = np.asarray(tokens[start : start + size], np.int32)
        count = np.clip(len(piece) - length * np.arange(batch), 0, length).astype(np.int32)
        yield np.pad(piece, (0, size - len(piece))).reshape(batch, length), count


def check_batch(model: Decoder, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (B, T) and count (B,), int32, of a batch that a model can read; ValueError else."""
    given, real_ones = batch if isinstance(batch, tuple) else (batch, None)
    tokens = np.asarray(given)
    if tokens.ndim != 2 or not tokens.size or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"tokens: got {tokens.dtype}{list(tokens.shape)}; accepted: integers (B, T)"
        )
    batch_size, length = tokens.shape
    count = np.full(batch_size, length) if real_ones is None else np.asarray(real_ones)
    if count.shape != (batch_size,) or (count < 0).any() or (count > length).any():
        raise ValueError(
            f"count: got {count.tolist()}; accepted: {batch_size} numbers from 0 to {length}"
        )
    vocab = model.config.vocab_size
    # Padding may hold anything; an id outside the table would be looked up as NaN.
    tokens = np.where(np.arange(length) < count[:, None], tokens, 0)
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise ValueError(
            f"tokens: got ids {tokens.min()} to {tokens.max()}; accepted: 0 to {vocab - 1}"
        )
    return tokens.astype(np.int32), count.astype(np.int32)


@partial(jax.jit, static_argnames="per_head")
def _amax(model: Decoder, tokens: Array, count: Array, per_head: bool) -> Array:
    """(B, T, M) float32: of each token, the amax behind every scale, layer by layer."""
    parts = []
    for seen in projections(model, tokens, count):
        if seen is not None:
            q, k, v = (jnp.abs(x.astype(jnp.float32)).max(-1) for x in (seen.q, seen.k, seen.v))
            parts += [q, *(x if per_head else x.max(-1, keepdims=True) for x in (k, v))]
    return jnp.concatenate(parts, axis=-1)


def _scale(amax: np.ndarray, largest: float) -> np.ndarray:
    """float32 scales; 1 where all numbers were 0, and never so small that it becomes 0."""
    scale = np.maximum(amax / largest, np.finfo(np.float32).tiny)
    return np.where(amax > 0, scale, 1).astype(np.float32)


def _split(
    model: Decoder, numbers: np.ndarray, per_head: bool
) -> Iterator[dict[str, np.ndarray] | None]:
    """(..., M) numbers of `_amax` as (..., N) and (..., K or 1) of each layer that makes keys."""
    start = 0
    for attention in model.config.attention:
        if attention.shares_with is not None:
            yield None
            continue
        kv_heads = attention.kv_heads if per_head else 1
        widths = (attention.query_heads, kv_heads, kv_heads)
        ends = start + np.cumsum((0, *widths))
        yield {
            name: numbers[..., first:end]
            for name, first, end in zip(_FIELDS, ends, ends[1:], strict=False)
        }
        start = ends[-1]


def _of_layer(scales: dict[str, np.ndarray], per_head: bool) -> LayerScales:
    """One scale a tensor has shape ()."""
    k, v = (scales[name] if per_head else scales[name][..., 0] for name in ("k_scale", "v_scale"))
    return LayerScales(k, v, scales["q_scale"])


def _check_finite(model: Decoder, amax: np.ndarray, per_head: bool) -> None:
    for i, layer in enumerate(_split(model, amax, per_head)):
        for name, values in (layer or {}).items():
            if not np.isfinite(values).all():
                raise ValueError(
                    f"layers[{i}].{name}: got infinite or NaN numbers to scale; accepted: finite"
                )
