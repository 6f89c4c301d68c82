"""The loss of a model on a text that it was not trained on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from kvjax.nn import Decoder


def held_out_loss(model: Decoder, tokens: np.ndarray, seq_len: int = 512, batch: int = 8) -> float:
    """Mean cross entropy, nats per token, of predicting each of `tokens` but the first.

    Args:
      model: computes in the dtype of its parameters.
      tokens: (n,) token ids, at least 2.
      seq_len: tokens predicted in one window. A window starts with the last token of the one before
        as all its context; the last window is shorter where seq_len does not divide n - 1.
      batch: windows computed together.

    Raises:
      ValueError: fewer than two tokens, or windows longer than the model's learned positions.
    """
    predicted = len(tokens) - 1
    if predicted < 1:
        raise ValueError(f"held-out text has {len(tokens)} tokens: at least 2 are needed")
    seq_len = min(seq_len, predicted)
    total = 0.0
    steps = np.arange(seq_len + 1)
    for first in range(0, predicted, batch * seq_len):
        starts = first + seq_len * np.arange(batch)
        # Rows past the end are padding; they repeat the last token and count for nothing.
        windows = np.asarray(tokens[np.minimum(starts[:, None] + steps, predicted)], np.int32)
        counts = np.clip(predicted - starts, 0, seq_len)
        total += float(_sum_of_losses(model, windows, counts))
    return total / predicted


@jax.jit
def _sum_of_losses(model: Decoder, windows: Array, counts: Array) -> Array:
    """Summed cross entropy of the first counts (B,) targets of each window (B, T + 1)."""
    logits, _ = model(windows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    real = jnp.arange(losses.shape[1]) < counts[:, None]
    return jnp.sum(jnp.where(real, losses, 0.0))
