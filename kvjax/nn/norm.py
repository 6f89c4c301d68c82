"""Normalisation layers: RMSNorm (arXiv:1910.07467) and LayerNorm (arXiv:1607.06450)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike


@dataclass(frozen=True)
class NormConfig:
    """Settings of a norm.

    Attributes:
      kind: "rms" or "layer".
      eps: added to the mean square or the variance.
      unit_offset: the stored scale of an RMSNorm is the distance from one (Gemma).
      bias: whether a LayerNorm has one; RMSNorms have none.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    unit_offset: bool = False
    bias: bool = True

    def build(self, width: int, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Module:
        if self.kind == "rms":
            return RMSNorm(width, self, dtype)
        # The two-pass variance: E[x^2] - E[x]^2 cancels badly where the mean is large.
        return nnx.LayerNorm(
            width,
            epsilon=self.eps,
            use_bias=self.bias,
            param_dtype=dtype,
            use_fast_variance=False,
            rngs=rngs,
        )


class RMSNorm(nnx.Module):
    """x / rms(x) over the last axis in float32, then the learned scale (width,)."""

    def __init__(self, width: int, config: NormConfig, dtype: DTypeLike):
        self.config = config
        self.scale = nnx.Param(jnp.full((width,), 0.0 if config.unit_offset else 1.0, dtype))

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        normed = x32 / jnp.sqrt(mean_square + self.config.eps)
        scale = self.scale[...].astype(x32.dtype)
        if self.config.unit_offset:
            scale = 1 + scale
        # Rounded once, after the scale, as Gemma and OLMo-2 do. Llama rounds before it too, which
        # compilers leave out where they fuse the two.
        return (normed * scale).astype(x.dtype)
