"""How far the predictions of a converted model are from its source's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax import sizing
from kvjax.models.load import load
from kvjax.nn import Decoder

# A stage, what is done of it, and all there is of it.
type Progress = Callable[[str, int, int], None]

WINDOW = 256  # tokens that are predicted together, from nothing before them


@dataclass(frozen=True)
class Comparison:
    """Predictions of two models on the same tokens, both computed in float32.

    Attributes:
      tokens: positions compared, in windows of at most 256 that are read on their own.
      kl: mean KL divergence of the converted model's distribution from the source's, in nats:
        sum over the vocabulary of p (log p - log q), p being the source's.
      top1_agreement: share of the positions whose likeliest next token is the same.
      source_loss, converted_loss: mean cross entropy of the next token in nats; None where the
        tokens are random.
    """

    tokens: int
    kl: float
    top1_agreement: float
    source_loss: float | None
    converted_loss: float | None

    def rows(self) -> Iterator[tuple[str, str]]:
        """Name and value of each figure, for a table."""
        yield "compared on", f"{self.tokens:,} tokens"
        yield "KL from the source", f"{self.kl:.4g} nats"
        yield "same likeliest token", f"{self.top1_agreement:.1%}"
        if self.source_loss is not None:
            yield "loss", f"{self.source_loss:.4f} → {self.converted_loss:.4f} nats"


def no_progress(stage: str, done: int, total: int) -> None:
    """Nothing is shown."""


def evaluation_windows(
    model_dir: str | os.PathLike[str],
    tokens_path: str | os.PathLike[str] | None,
    most: int,
    seed: int,
) -> np.ndarray:
    """Token ids to compare on, as windows of equal width (count, width) int32.

    Args:
      model_dir: the source model, for its vocabulary, tokenizer and largest position.
      tokens_path: text or token ids; None for random ids of the vocabulary.
      most: tokens taken from the beginning; what fills no window at the end is left out.
      seed: of the random ids.

    Raises:
      ValueError: fewer than two tokens are asked for, or what `kvjax.train.data.read_tokens`
        raises.
    """
    if most < 2:
        raise ValueError(f"evaluate_tokens={most}: at least 2 are needed")
    config = sizing.read_config(model_dir)
    vocab_size = config["vocab_size"]
    if tokens_path is None:
        tokens = np.random.default_rng(seed).integers(vocab_size, size=most)
    else:
        # Here, because kvjax.train brings libraries of training that nothing else here needs.
        from kvjax.train.data import read_tokens

        tokens = read_tokens(tokens_path, model_dir, vocab_size, at_least=2)[:most]
    positions = config.get("max_position_embeddings") or config.get("n_positions") or WINDOW
    width = min(WINDOW, positions, len(tokens))
    count = len(tokens) // width
    return np.asarray(tokens[: count * width], np.int32).reshape(count, width)


def compare(
    src_dir: str | os.PathLike[str],
    dst_dir: str | os.PathLike[str],
    windows: np.ndarray,
    is_text: bool,
    on_progress: Progress = no_progress,
) -> Comparison:
    """Compare two models of one vocabulary, of which only one is in memory at a time.

    Args:
      src_dir, dst_dir: model directories, the source's and the converted one's.
      windows: (count, T) token ids.
      is_text: whether the loss of predicting them says anything.
      on_progress: called with "comparing", windows done, and windows of both models.
    """
    total = 2 * len(windows)

    def predict(model_dir: str | os.PathLike[str], done: int) -> Iterator[Array]:
        model = load(model_dir, dtype="f32")
        for i, window in enumerate(windows, start=1):
            yield _log_probabilities(model, window)
            on_progress("comparing", done + i, total)

    source = list(predict(src_dir, 0))
    pairs = zip(windows, source, predict(dst_dir, len(windows)), strict=True)
    figures = np.array([_distances(*pair) for pair in pairs], np.float64)
    kl, top1_agreement, *losses = map(float, figures.mean(axis=0))
    source_loss, converted_loss = losses if is_text else (None, None)
    return Comparison(windows.size, kl, top1_agreement, source_loss, converted_loss)


@jax.jit
def _log_probabilities(model: Decoder, window: Array) -> Array:
    """(T,) token ids -> (T, V), of the token after each."""
    return jax.nn.log_softmax(model(window[None])[0][0])


@jax.jit
def _distances(window: Array, log_p: Array, log_q: Array) -> Array:
    """(4,): KL of q from p, top-1 agreement, cross entropy of p and of q, means of a window."""
    kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1).mean()
    same = jnp.mean(log_p.argmax(-1) == log_q.argmax(-1))
    losses = [
        -jnp.take_along_axis(log[:-1], window[1:, None], axis=-1).mean() for log in (log_p, log_q)
    ]
    return jnp.stack([kl, same, *losses])
