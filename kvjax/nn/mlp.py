"""The feed-forward layer: gated (SwiGLU, GeGLU; arXiv:2002.05202) or plain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


@dataclass(frozen=True)
class MlpConfig:
    """`gated`: down(act(gate(x)) * up(x)), else down(act(up(x))); `fused`: kernel [gate | up]."""

    width: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    fused: bool = False

    def build(self, d_model: int, dtype: DTypeLike, rngs: nnx.Rngs) -> Mlp:
        return Mlp(d_model, self, dtype, rngs)


class Mlp(nnx.Module):
    """(B, T, D) -> (B, T, D)."""

    def __init__(self, d_model: int, config: MlpConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        linear = partial(
            nnx.Linear,
            use_bias=config.bias,
            param_dtype=dtype,
            kernel_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.config = config
        if config.gated and config.fused:
            self.gate_up = linear(d_model, 2 * config.width)
        else:
            self.up = linear(d_model, config.width)
            if config.gated:
                self.gate = linear(d_model, config.width)
        self.down = linear(config.width, d_model)

    def __call__(self, x: Array) -> Array:
        activation = ACTIVATIONS[self.config.activation]
        if not self.config.gated:
            return self.down(activation(self.up(x)))
        if self.config.fused:
            gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        else:
            gate, up = self.gate(x), self.up(x)
        return self.down(activation(gate) * up)
