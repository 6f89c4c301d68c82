"""The attention module against a float64 loop over heads, for each of its settings."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.nn import Attention, AttentionConfig, NormConfig, Rope

BASE = AttentionConfig(d_model=12, query_heads=6, kv_heads=2, key_dim=4, value_dim=4)
SETTINGS = {
    "mha": {"kv_heads": 6},
    "gqa": {},
    "mqa": {"kv_heads": 1},
    "biases": {"qkv_bias": True, "out_bias": True},
    "fused": {"fused": True, "qkv_bias": True},
    "values narrower than keys": {"value_dim": 2, "fused": True},
    "norm per head": {"qk_norm": "head", "rope": Rope(4)},
    "norm at full width": {"qk_norm": "full", "rope": Rope(4), "norm": NormConfig(eps=0.1)},
    "rope": {"rope": Rope(4, theta=50.0)},
    "partial rope": {"rope": Rope(2, theta=50.0)},
    "soft cap": {"soft_cap": 0.7},
    "scale": {"scale": 2.0},
    "window": {"window": 3},
    "window of itself": {"window": 1},
    "chunk": {"chunk": 3},
    "sinks": {"sinks": True},
    "sinks beside a window and a cap": {"sinks": True, "window": 2, "soft_cap": 0.7},
}


def build(config: AttentionConfig) -> Attention:
    """A module whose parameters are all of order 1."""
    module = Attention(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(1), 32))
    return jax.tree.map(lambda leaf: 0.5 * jax.random.normal(next(keys), leaf.shape), module)


@jax.jit
def run(module, x, positions):
    """The output, and the q, k and v behind it."""
    return module(x, positions)[0], module.project(x, positions)


def expected_output(module: Attention, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """q (T, N, H), k and v of one row -> (T, D), head by head and query by query, in float64."""
    c = module.config
    q, k, v = (np.asarray(part, np.float64) for part in (q, k, v))
    out = np.zeros((len(q), c.query_heads, c.value_dim))
    for t in range(len(q)):
        first = 0 if c.window is None else max(0, t - c.window + 1)
        first = first if c.chunk is None else t - t % c.chunk
        for head in range(c.query_heads):
            kv_head = head // (c.query_heads // c.kv_heads)
            scores = k[first : t + 1, kv_head] @ q[t, head]
            scores = scores * (c.key_dim**-0.5 if c.scale is None else c.scale)
            if c.soft_cap is not None:
                scores = c.soft_cap * np.tanh(scores / c.soft_cap)
            weights = np.exp(scores - scores.max())
            total = weights.sum()
            if c.sinks:
                total += np.exp(float(module.sink_logits[...][head]) - scores.max())
            out[t, head] = weights @ v[first : t + 1, kv_head] / total
    bias = 0 if module.o.bias is None else np.asarray(module.o.bias[...])
    return out.reshape(len(q), -1) @ np.asarray(module.o.kernel[...], np.float64) + bias


X = np.random.default_rng(0).normal(size=(7, 12)).astype(np.float32)
POSITIONS = np.arange(7, dtype=np.int32)[None]


@pytest.mark.parametrize("setting", SETTINGS)
def test_output(setting):
    module = build(replace(BASE, **SETTINGS[setting]))
    y, qkv = run(module, X[None], POSITIONS)
    expected = expected_output(module, *(part[0] for part in qkv))
    np.testing.assert_allclose(y[0], expected, rtol=1e-5, atol=1e-5)


def test_projections_are_kernels_with_heads_on_the_last_axis():
    module = build(replace(BASE, qkv_bias=True))
    _, k, v = run(module, X[None], POSITIONS)[1]
    for part, linear in ((k, module.k), (v, module.v)):
        flat = X.astype(np.float64) @ np.asarray(linear.kernel[...]) + np.asarray(linear.bias[...])
        np.testing.assert_allclose(part[0, :, 1], flat[:, 4:8], atol=1e-5)


def test_a_fused_projection_is_q_then_k_then_v():
    separate = build(replace(BASE, qkv_bias=True))
    fused = build(replace(BASE, qkv_bias=True, fused=True))
    parts = (separate.q, separate.k, separate.v)
    fused.qkv.kernel[...] = jnp.concatenate([part.kernel[...] for part in parts], axis=-1)
    fused.qkv.bias[...] = jnp.concatenate([part.bias[...] for part in parts], axis=-1)
    fused.o = separate.o
    left, right = (run(module, X[None], POSITIONS) for module in (fused, separate))
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def rms(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def test_norm_per_head_shares_one_scale():
    module = build(replace(BASE, qk_norm="head"))
    q, k, v = run(module, X[None], POSITIONS)[1]
    raw = (X @ module.k.kernel[...]).reshape(7, 2, 4)
    np.testing.assert_allclose(k[0], rms(raw, module.k_norm.scale[...], 1e-6), rtol=1e-4)
    raw = (X @ module.q.kernel[...]).reshape(7, 6, 4)
    np.testing.assert_allclose(q[0], rms(raw, module.q_norm.scale[...], 1e-6), rtol=1e-4)
    np.testing.assert_allclose(v[0], (X @ module.v.kernel[...]).reshape(7, 2, 4), atol=1e-6)


def test_norm_at_full_width_spans_all_heads():
    module = build(replace(BASE, qk_norm="full"))
    assert module.q_norm.scale.shape == (24,)
    assert module.k_norm.scale.shape == (8,)
    _, k, _ = run(module, X[None], POSITIONS)[1]
    raw = X @ module.k.kernel[...]
    expected = rms(raw, module.k_norm.scale[...], 1e-6).reshape(7, 2, 4)
    np.testing.assert_allclose(k[0], expected, rtol=1e-4)


def test_padding_takes_no_part():
    module = build(replace(BASE, rope=Rope(4)))
    padded = np.concatenate([X, np.full((3, 12), np.nan, np.float32)])[None]
    marked = np.concatenate([np.arange(7), [-1, -1, -1]]).astype(np.int32)[None]
    padded_y, _ = run(module, padded, marked)
    y, _ = run(module, X[None], POSITIONS)
    np.testing.assert_allclose(padded_y[0, :7], y[0], rtol=1e-5, atol=1e-5)


def test_gradients_reach_every_parameter():
    settings = {"qk_norm": "head", "qkv_bias": True, "out_bias": True, "sinks": True}
    module = build(replace(BASE, rope=Rope(4), **settings))
    loss = jax.jit(jax.grad(lambda module: jnp.sum(module(X[None], POSITIONS)[0] ** 2)))
    gradients = jax.tree_util.tree_flatten_with_path(loss(module))[0]
    zero = [jax.tree_util.keystr(keys) for keys, leaf in gradients if not np.abs(leaf).max() > 0]
    assert zero == []


@pytest.mark.parametrize("kv_heads", [0, 4, 12])
def test_kv_heads_must_divide_query_heads(kv_heads):
    with pytest.raises(ValueError, match=f"kv_heads={kv_heads} must divide query_heads=6"):
        replace(BASE, kv_heads=kv_heads)


def test_a_chunk_beside_a_window_is_refused():
    with pytest.raises(
        ValueError, match="chunk: got 4 beside a window of 3; accepted: one of them"
    ):
        replace(BASE, window=3, chunk=4)
