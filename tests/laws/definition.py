"""Attention as it is defined, in float64 and numpy: what every way through the library must give.

Nothing of `kvjax.ops` is used, so that a fault common to all its ways shows.
"""

import numpy as np

from kvjax.cache import SinkRing
from kvjax.nn import Attention, AttentionConfig


def visible(config: AttentionConfig, tokens: int, layout: SinkRing | None = None) -> np.ndarray:
    """Bool (T, T): which keys each query sees."""
    query, key = np.mgrid[:tokens, :tokens]
    seen = key <= query
    if config.window is not None:
        seen &= query - key < config.window
    if config.chunk is not None:
        seen &= query // config.chunk == key // config.chunk
    if layout is not None:
        seen &= (query - key < layout.window) | (key < layout.sink_tokens)
    return seen


def forward(module: Attention, x: np.ndarray, layout: SinkRing | None = None) -> np.ndarray:
    """x (B, T, D) -> outputs (B, T, D) of each row's T tokens; `layout` hides what it drops."""
    c, (batch, tokens, _) = module.config, x.shape
    positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), (batch, tokens))
    q, k, v = (np.asarray(part, np.float64) for part in module.project(x, positions))
    k, v = (np.repeat(part, c.query_heads // part.shape[2], axis=2) for part in (k, v))
    scores = np.einsum("bqnh,bknh->bnqk", q, k)
    if layout is not None and layout.reindexed:
        # The first tokens are as near as what lies between were not there.
        places = np.minimum(positions, layout.sink_tokens + layout.window - 1)
        q = np.asarray(module.project(x, places)[0], np.float64)
        near = np.einsum("bqnh,bknh->bnqk", q, k)
        scores[..., : layout.sink_tokens] = near[..., : layout.sink_tokens]
    scores *= q.shape[-1] ** -0.5 if c.scale is None else c.scale
    if c.soft_cap is not None:
        scores = c.soft_cap * np.tanh(scores / c.soft_cap)
    scores = np.where(visible(c, tokens, layout), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bnqk,bknh->bqnh", weights, v).reshape(batch, tokens, -1)
    return np.asarray(module.o(out.astype(np.float32)))
