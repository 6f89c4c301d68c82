"""Teacher-forced scoring of a text through a cache: what each token costs, and how far it strays.

A text is read through the cache in chunks, or token by token, as generation would. What is kept of
it are the final hidden states, D numbers a token; logits, V numbers a token, exist for few tokens
at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.cache import Cache
from kvjax.nn import Decoder

CHUNK = 256  # tokens of a row that are read together
ROWS = 64  # tokens whose logits exist at a time


@dataclass(frozen=True)
class Scores:
    """What a model made of the tokens that it was to predict: all of each row but its first.

    Entries of padding are 0, and -1 in `likeliest`.

    Attributes:
      nll: (B, T - 1) float64, negative log-likelihood of each token, nats.
      kl: (B, T - 1) float64, KL(reference || this) of the distributions of each token, nats; None
        without a reference.
      likeliest: (B, T - 1) int32, what the model would have said instead.
      predicted: (B,) int64, tokens predicted of each row.
      states: (B, T - 1, D), the final hidden states, from which all this follows.
    """

    nll: np.ndarray
    kl: np.ndarray | None
    likeliest: np.ndarray
    predicted: np.ndarray
    states: Array

    @property
    def tokens(self) -> int:
        """Tokens predicted in all rows."""
        return int(self.predicted.sum())

    @property
    def loss(self) -> float:
        """Mean of `nll`, nats per token."""
        return float(self.nll.sum()) / self.tokens

    @property
    def perplexity(self) -> float:
        """exp of `loss`."""
        return float(np.exp(self.loss))

    @property
    def divergence(self) -> float:
        """Mean of `kl`, nats per token; ValueError where there was no reference."""
        if self.kl is None:
            raise ValueError("divergence: scored without a reference; accepted: score(reference=)")
        return float(self.kl.sum()) / self.tokens


def score(
    model: Decoder,
    tokens: Array,
    cache: Cache,
    *,
    count: Array | None = None,
    chunk: int = CHUNK,
    reference: Scores | None = None,
) -> tuple[Scores, Cache]:
    """Read a text through a cache and score all of its tokens but the first.

    Calls join where their tokens share one: the last of a call, which it predicts and does not
    read, is the first of the next. So a text may be prefilled in chunks and then decoded token by
    token, or two caches go side by side over it piece by piece.

    Args:
      model: the decoder.
      tokens: (B, T) ids, right-padded; they follow what the cache holds. At least 2.
      cache: of B rows, with room for T - 1 more tokens of each; it is taken over.
      count: (B,) int32, the real tokens of each row; None means all T.
      chunk: tokens of a row that one step reads; 1 decodes as generation does.
      reference: scores of the same tokens through another cache, such as one in f32, for the
        divergence from them.

    Returns:
      The scores, and the cache, which then holds all tokens but the last of each row.

    Raises:
      CapacityError: the cache has no room for the tokens.
      ValueError: for arguments that do not fit each other, or no token to predict.
    """
    ids = np.asarray(tokens)
    predicted = _check(model, ids, cache, count, chunk)
    if reference is not None:
        _check_reference(reference, predicted, ids.shape[1] - 1)
    parts = []
    for start in range(0, int(predicted.max()), chunk):
        piece = ids[:, start : start + chunk].astype(np.int32)
        piece = np.pad(piece, ((0, 0), (0, chunk - piece.shape[1])))
        real = np.clip(predicted - start, 0, chunk).astype(np.int32)
        states, cache = _read(model, piece, cache, real)
        parts.append(states)
    cache.check()
    width = ids.shape[1] - 1
    states = jnp.concatenate(parts, axis=1)[:, :width]
    states = jnp.pad(states, ((0, 0), (0, width - states.shape[1]), (0, 0)))
    return _measured(model, ids[:, 1:], predicted, states, reference), cache


@partial(jax.jit, donate_argnames="cache")
def _read(model: Decoder, tokens: Array, cache: Cache, count: Array) -> tuple[Array, Cache]:
    """Add a chunk (B, T); the hidden states (B, T, D)."""
    states, after = model.hidden(tokens, cache, count=count)
    assert after is not None  # as a cache was given
    return states, after


def _measured(
    model: Decoder,
    targets: np.ndarray,
    predicted: np.ndarray,
    states: Array,
    reference: Scores | None,
) -> Scores:
    """Scores of targets (B, T) from states (B, T, D), `ROWS` real ones at a time."""
    real = np.arange(targets.shape[1]) < predicted[:, None]
    nll, kl = np.zeros(real.shape), None if reference is None else np.zeros(real.shape)
    likeliest = np.full(real.shape, -1, np.int32)
    for where, n in _slices(real):
        against = None if reference is None else reference.states[where]
        figures = _figures(model, states[where], targets[where], against)
        # The last slice repeats its first token to be whole.
        where = tuple(axis[:n] for axis in where)
        nll[where], likeliest[where] = (np.asarray(figures[name])[:n] for name in ("nll", "top"))
        if kl is not None:
            kl[where] = np.asarray(figures["kl"])[:n]
    return Scores(nll, kl, likeliest, predicted, states)


def _slices(real: np.ndarray) -> Iterator[tuple[tuple[np.ndarray, ...], int]]:
    """Indices of `ROWS` places where real (B, T) is set, filled up to so many, and how many."""
    places = np.argwhere(real)
    for start in range(0, len(places), ROWS):
        part = places[start : start + ROWS]
        filled = np.concatenate([part, np.repeat(part[:1], ROWS - len(part), axis=0)])
        yield tuple(filled.T), len(part)


@jax.jit
def _figures(
    model: Decoder, states: Array, targets: Array, reference: Array | None
) -> dict[str, Array]:
    """nll and the likeliest token, (R,) each, of states (R, D); kl from reference (R, D)."""
    log_q = jax.nn.log_softmax(model.unembed(states))
    nll = -jnp.take_along_axis(log_q, targets[:, None].astype(jnp.int32), axis=-1)[:, 0]
    figures = {"nll": nll, "top": log_q.argmax(-1).astype(jnp.int32)}
    if reference is not None:
        figures["kl"] = divergence(jax.nn.log_softmax(model.unembed(reference)), log_q)
    return figures


def divergence(log_p: Array, log_q: Array) -> Array:
    """KL(p || q) over the last axis of two arrays of log-probabilities, float32 nats.

    As both sum to 1, sum of p (log p - log q) is sum of p (exp(d) - 1 - d) with d = log q - log p:
    no term is negative, and where p and q are close, rounding is far below the result.
    """
    p, d = jnp.exp(log_p), log_q - log_p
    near = jnp.abs(d) < 1
    close = p * (jnp.expm1(jnp.where(near, d, 0)) - d)
    return jnp.sum(jnp.where(near, close, jnp.exp(log_q) - p - p * d), axis=-1)


def _check(
    model: Decoder, tokens: np.ndarray, cache: Cache, count: Array | None, chunk: int
) -> np.ndarray:
    """(B,) int64, how many tokens of each row are to be predicted."""
    rows = len(cache.n)
    if (
        tokens.ndim != 2
        or len(tokens) != rows
        or tokens.shape[1] < 2
        or tokens.dtype.kind not in "iu"
    ):
        raise ValueError(
            f"tokens: got {tokens.dtype}{list(tokens.shape)}; accepted: integers ({rows}, T), the "
            f"cache's rows and at least 2 tokens"
        )
    vocab = model.config.vocab_size
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise ValueError(
            f"tokens: got ids {tokens.min()} to {tokens.max()}; accepted: 0 to {vocab - 1}"
        )
    if chunk < 1:
        raise ValueError(f"chunk: got {chunk}; accepted: 1 and more")
    real = np.full(rows, tokens.shape[1]) if count is None else np.asarray(count, np.int64)
    if real.shape != (rows,) or (real < 0).any() or (real > tokens.shape[1]).any():
        raise ValueError(
            f"count: got {real.tolist()}; accepted: {rows} numbers from 0 to {tokens.shape[1]}"
        )
    if real.max() < 2:
        raise ValueError(f"count: got {real.tolist()}; accepted: a row of 2 tokens and more")
    return np.maximum(real - 1, 0)


def _check_reference(reference: Scores, predicted: np.ndarray, width: int) -> None:
    if reference.nll.shape != (len(predicted), width) or (reference.predicted != predicted).any():
        raise ValueError(
            f"reference: got scores of {reference.predicted.tolist()} tokens, in an array "
            f"{list(reference.nll.shape)}; accepted: of the same tokens, {predicted.tolist()} in "
            f"[{len(predicted)}, {width}]"
        )
