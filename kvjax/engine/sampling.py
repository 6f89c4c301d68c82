"""Choosing the next token from logits."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class Sampler:
    """How to choose; frozen, so that it is static under jit.

    Attributes:
      temperature: 0 takes the likeliest token (greedy); logits are divided by it otherwise.
      top_k: keep the k likeliest tokens; None keeps all.
      top_p: keep the likeliest tokens whose probabilities reach p together (nucleus sampling,
        arXiv:1904.09751), at least one; None keeps all. Applied after top_k.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: at least 0 is needed")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: at least 1 is needed")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: more than 0 and at most 1 is needed")

    def __call__(self, logits: Array, key: Array) -> Array:
        """logits (B, V) -> tokens (B,) int32."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p is not None:
            logits = _nucleus(logits, self.top_p)
        return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def _nucleus(logits: Array, top_p: float) -> Array:
    """Logits (B, V) with -inf outside the smallest likeliest set that reaches top_p."""
    order = jnp.argsort(logits, axis=-1, descending=True)
    probs = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    # A token stays if those likelier than it have not reached top_p yet; so the first always does.
    kept_in_order = jnp.cumsum(probs, axis=-1) - probs < top_p
    kept = (
        jnp.zeros_like(kept_in_order).at[jnp.arange(len(order))[:, None], order].set(kept_in_order)
    )
    return jnp.where(kept, logits, -jnp.inf)
