"""The mixture of experts against a float64 loop over tokens and their experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.nn import ClampedSwiglu, MoeConfig
from kvjax.nn.moe import Moe

X = np.random.default_rng(0).normal(size=(2, 7, 4)).astype(np.float32)


def build(dtype=jnp.float32, **settings) -> Moe:
    """A module whose parameters are all of order 1."""
    settings = {"width": 6, "experts": 5, "chosen": 2} | settings
    moe = MoeConfig(**settings).build(4, dtype, nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(1), 8))
    return jax.tree.map(
        lambda leaf: jax.random.normal(next(keys), leaf.shape).astype(leaf.dtype), moe
    )


@jax.jit
def run(moe, x):
    return moe(x)


def affine(x: np.ndarray, layer, expert: int | None = None) -> np.ndarray:
    kernel = np.asarray(layer.kernel[...], np.float64)
    bias = np.zeros(kernel.shape[:-2] + kernel.shape[-1:])
    if layer.bias is not None:
        bias = np.asarray(layer.bias[...], np.float64)
    return x @ kernel + bias if expert is None else x @ kernel[expert] + bias[expert]


def expected_output(moe: Moe, x: np.ndarray) -> np.ndarray:
    c = moe.config
    out = np.zeros_like(x, np.float64)
    for where in np.ndindex(x.shape[:-1]):
        token = x[where].astype(np.float64)
        logits = affine(token, moe.router)
        chosen = np.argsort(-logits)[: c.chosen]
        weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        for expert, weight in zip(chosen, weights, strict=True):
            inner = affine(token, moe.gate_up, expert)
            gate, up = np.minimum(inner[: c.width], c.gate.limit), inner[c.width :]
            up = np.clip(up, -c.gate.limit, c.gate.limit)
            gated = gate / (1 + np.exp(-c.gate.alpha * gate)) * (up + 1)
            out[where] += weight * affine(gated, moe.down, expert)
    return out


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bias": True},
        {"chosen": 1},
        {"chosen": 5, "bias": True},
        {"experts": 1, "chosen": 1},
        {"gate": ClampedSwiglu(alpha=0.5, limit=0.7), "bias": True},
    ],
    ids=str,
)
def test_output(settings):
    moe = build(**settings)
    np.testing.assert_allclose(run(moe, X), expected_output(moe, X), rtol=1e-4, atol=1e-4)


def test_experts_that_no_token_picks_are_idle():
    moe = build(bias=True)
    moe.router.bias[...] = jnp.array([0.0, -1e3, 0, -1e3, 0])
    before = run(moe, X)
    for layer in (moe.gate_up, moe.down):
        layer.kernel[...] = layer.kernel[...].at[jnp.array([1, 3])].set(1e6)
    np.testing.assert_array_equal(run(moe, X), before)


def test_a_token_takes_no_notice_of_others():
    moe = build(bias=True)
    np.testing.assert_allclose(run(moe, X)[1:, 3:4], run(moe, X[1:, 3:4]), atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_dtype_is_kept(dtype):
    """With one expert for all, so that rounding cannot change which ones are picked."""
    moe = build(dtype, experts=2, chosen=2, bias=True)
    out = run(moe, jnp.asarray(X, dtype))
    assert out.dtype == dtype
    expected = expected_output(moe, np.asarray(jnp.asarray(X, dtype), np.float32))
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=0.1, atol=0.15)


def test_gradients_reach_every_parameter():
    loss = jax.jit(jax.grad(lambda moe: jnp.sum(moe(jnp.asarray(X)) ** 2)))
    gradients = jax.tree_util.tree_flatten_with_path(loss(build(bias=True)))[0]
    zero = [jax.tree_util.keystr(keys) for keys, leaf in gradients if not np.abs(leaf).max() > 0]
    assert zero == []


@pytest.mark.parametrize("chosen", [0, 6])
def test_more_experts_than_there_are_cannot_be_chosen(chosen):
    with pytest.raises(ValueError, match=f"chosen: got {chosen}; accepted: 1 to 5 experts"):
        MoeConfig(width=6, experts=5, chosen=chosen)
