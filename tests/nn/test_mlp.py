import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.scipy.special import erf

from kvjax.nn import MlpConfig
from kvjax.nn.mlp import Mlp

X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + erf(x / np.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}


def build(**settings) -> Mlp:
    mlp = Mlp(4, MlpConfig(width=6, **settings), jnp.float32, nnx.Rngs(0))
    for linear in (getattr(mlp, name, None) for name in ("up", "gate", "gate_up", "down")):
        if linear is not None:
            linear.kernel[...] = linear.kernel[...] * 50
            if linear.bias is not None:
                linear.bias[...] = jnp.linspace(-1, 1, linear.bias[...].size)
    return mlp


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_plain(name):
    mlp = build(activation=name, gated=False, bias=True)
    up = X @ mlp.up.kernel[...] + mlp.up.bias[...]
    expected = ACTIVATIONS[name](up) @ mlp.down.kernel[...] + mlp.down.bias[...]
    np.testing.assert_allclose(mlp(X), expected, atol=1e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated(name):
    mlp = build(activation=name)
    gate, up = X @ mlp.gate.kernel[...], X @ mlp.up.kernel[...]
    expected = (ACTIVATIONS[name](gate) * up) @ mlp.down.kernel[...]
    np.testing.assert_allclose(mlp(X), expected, atol=1e-5)


def test_fused_is_gate_then_up():
    separate, fused = build(bias=True), build(bias=True, fused=True)
    for name in ("kernel", "bias"):
        gate, up = getattr(separate.gate, name)[...], getattr(separate.up, name)[...]
        getattr(fused.gate_up, name)[...] = jnp.concatenate([gate, up], axis=-1)
    fused.down = separate.down
    np.testing.assert_allclose(fused(X), separate(X), atol=1e-6)
