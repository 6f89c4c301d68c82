import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.nn import NormConfig

X = np.random.default_rng(0).normal(3, 2, (2, 5, 12)).astype(np.float32)
SCALE = np.linspace(0.5, 2, 12, dtype=np.float32)


def build(config, dtype=jnp.float32):
    norm = config.build(12, dtype, nnx.Rngs(0))
    norm.scale[...] = jnp.asarray(SCALE, dtype)
    return norm


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm(eps, unit_offset):
    norm = build(NormConfig(eps=eps, unit_offset=unit_offset))
    x = X.astype(np.float64)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (SCALE + unit_offset)
    np.testing.assert_allclose(norm(jnp.asarray(X)), expected, rtol=1e-6)


@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_layer_norm(eps):
    norm = build(NormConfig("layer", eps=eps))
    norm.bias[...] = jnp.arange(12.0)
    x = X.astype(np.float64)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    expected = expected * SCALE + np.arange(12)
    np.testing.assert_allclose(norm(jnp.asarray(X)), expected, rtol=1e-5, atol=1e-5)


def test_layer_norm_without_bias():
    norm, biased = build(NormConfig("layer", bias=False)), build(NormConfig("layer"))
    assert norm.bias is None
    np.testing.assert_array_equal(norm(jnp.asarray(X)), biased(jnp.asarray(X)))


def test_layer_norm_keeps_its_digits_far_from_zero():
    norm = build(NormConfig("layer", eps=1e-5))
    x = X.astype(np.float64) + 3000
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * SCALE
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, atol=2e-3)


@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm_in_bf16_rounds_once(unit_offset):
    """Statistics and scale are applied in float32: half of the last of 8 bits is lost."""
    norm = build(NormConfig(eps=1e-6, unit_offset=unit_offset), jnp.bfloat16)
    x = jnp.asarray(X, jnp.bfloat16)
    out = norm(x)
    assert out.dtype == jnp.bfloat16
    x64, scale = np.asarray(x, np.float64), np.asarray(norm.scale[...], np.float64) + unit_offset
    expected = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2**-8)


@pytest.mark.parametrize("unit_offset", [False, True])
def test_a_new_norm_scales_by_one(unit_offset):
    norm = NormConfig(unit_offset=unit_offset).build(12, jnp.float32, nnx.Rngs(0))
    out = norm(jnp.asarray(X))
    np.testing.assert_allclose(np.square(out).mean(-1), 1, rtol=1e-5)
