"""The two jitted steps of inference. Both take the cache over: the one passed in is dead after.

Plain `jax.jit` over the module as a pytree, with the cache donated, so that a step returns logits
and aliased cache buffers and nothing else.
"""

from __future__ import annotations

from functools import partial

import jax
from jax import Array

from kvjax.cache import Cache
from kvjax.nn import Decoder


@partial(jax.jit, donate_argnames="cache")
def prefill(model: Decoder, tokens: Array, cache: Cache, count: Array) -> tuple[Array, Cache]:
    """Add a chunk of right-padded tokens (B, T), count (B,) real ones a row.

    Returns the logits (B, V) after each row's last real token, and the cache.
    """
    return model(tokens, cache, count=count, logits="last")


@partial(jax.jit, donate_argnames="cache")
def decode(model: Decoder, tokens: Array, cache: Cache, count: Array) -> tuple[Array, Cache]:
    """Add the next T tokens (B, T) of each row, usually 1 and up to 8, count (B,) of them real.

    Returns the logits (B, T, V) after every token, and the cache. A row with count 0 rests.
    """
    return model(tokens, cache, count=count)
