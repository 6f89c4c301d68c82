"""Re-indexed first tokens against StreamingLLM as its authors wrote it, in float64.

Their cache holds keys before RoPE; each step rotates them to their indices in the cache, and the
query to its own (arXiv:2309.17453, section 3.2).
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.cache import SinkRing, init_layer_cache
from kvjax.nn import Attention, AttentionConfig, Rope

SINKS, WINDOW, TOKENS, THETA, ROTATED = 2, 5, 23, 50.0, 6
CONFIG = AttentionConfig(
    d_model=16,
    query_heads=4,
    kv_heads=2,
    key_dim=8,
    value_dim=4,
    qk_norm="head",
    rope=Rope(ROTATED, theta=THETA),
)
X = np.random.default_rng(0).normal(size=(2, TOKENS, 16)).astype(np.float32)
REINDEXED = SinkRing(SINKS, WINDOW, reindexed=True)


@cache
def module() -> Attention:
    drawn = Attention(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(1), 32))
    return jax.tree.map(lambda leaf: 0.5 * jax.random.normal(next(keys), leaf.shape), drawn)


def rotated(x: np.ndarray, places: np.ndarray) -> np.ndarray:
    """x (T, heads, H) at places (T,), its first channels in pairs of halves."""
    half = ROTATED // 2
    angles = (places[:, None] * THETA ** (-np.arange(half) / half))[:, None]
    low, high, rest = np.split(x, [half, ROTATED], axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], -1)


def streaming_llm(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Unrotated q (T, N, H), k (T, K, H) and v (T, K, HV) of one row -> (T, N, HV)."""
    held: list[int] = []
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    for token in range(len(q)):
        held.append(token)
        if len(held) > SINKS + WINDOW:
            del held[SINKS]
        keys = rotated(k[held], np.arange(len(held)))
        query = rotated(q[[token]], np.array([len(held) - 1]))[0]
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // k.shape[1])
            scores = keys[:, kv_head] @ query[head] * q.shape[-1] ** -0.5
            weights = np.exp(scores - scores.max())
            out[token, head] = weights @ v[held, kv_head] / weights.sum()
    return out


def expected() -> np.ndarray:
    """Outputs (B, TOKENS, D) of the authors' way."""
    q, k, v = (np.asarray(part, np.float64) for part in jax.jit(Attention.heads)(module(), X))
    attended = np.stack([streaming_llm(*row) for row in zip(q, k, v, strict=True)])
    return attended.reshape(2, TOKENS, -1) @ np.asarray(module().o.kernel[...], np.float64)


run = jax.jit(lambda module, *rest: module(*rest))


def streamed(layout: SinkRing, split: tuple[int, ...]) -> np.ndarray:
    """Outputs (B, TOKENS, D), in chunks; row 1 stays behind by the last token of each."""
    held = init_layer_cache(
        2, TOKENS, kv_heads=2, key_dim=8, value_dim=4, layout=layout, codec="f32"
    )
    y, done = np.full((2, TOKENS, 16), np.nan), np.zeros(2, int)
    steps = [*split, *([1] * TOKENS)]
    while (done < TOKENS).any():
        width = steps.pop(0)
        count = np.minimum([width, max(width - 1, 1)], TOKENS - done)
        places = done[:, None] + np.arange(width)
        positions = np.where(np.arange(width) < count[:, None], places, -1).astype(np.int32)
        x = np.take_along_axis(X, np.minimum(places, TOKENS - 1)[..., None], axis=1)
        out, held = run(module(), x, positions, held)
        for row, (start, many) in enumerate(zip(done, count, strict=True)):
            y[row, start : start + many] = out[row, :many]
        done += count
    held.check()
    return y


@pytest.mark.parametrize("split", [(), (9, 9), (18,)], ids=["one by one", "chunks", "at once"])
def test_it_is_streaming_llm(split):
    np.testing.assert_allclose(streamed(REINDEXED, split), expected(), atol=1e-5)


def test_it_differs_from_absolute_positions_once_the_ring_turns():
    absolute = streamed(SinkRing(SINKS, WINDOW), (9, 9))
    gap = np.abs(absolute - expected()).max(axis=(0, 2))
    turns = SINKS + WINDOW
    assert gap[:turns].max() < 1e-5
    assert gap[turns:].min() > 1e-3
