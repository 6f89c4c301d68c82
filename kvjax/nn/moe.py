"""A mixture of experts: each token passes through the few gated MLPs that a router picks for it.

Top-k routing: Shazeer et al., arXiv:1701.06538. As in Mixtral (arXiv:2401.04088, section 2.1) and
gpt-oss, the weights of a token's experts are a softmax over their own router logits alone.

The products are `jax.lax.ragged_dot`, for which accelerators have kernels that do the chosen
experts' work alone. On CPUs XLA multiplies every row with every expert and copies the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike


@dataclass(frozen=True)
class ClampedSwiglu:
    """gpt-oss's gate: g * sigmoid(alpha * g) * (u + 1), for g = min(gate, limit), |u| <= limit."""

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate: Array, up: Array) -> Array:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


@dataclass(frozen=True)
class MoeConfig:
    """Settings of a mixture of experts.

    Attributes:
      width: inner channels of one expert, F.
      experts: how many there are, E.
      chosen: how many of them each token passes through, at most E.
      gate: (gate, up) -> what the down projection reads.
      bias: whether the router and the experts' projections carry biases.
    """

    width: int
    experts: int
    chosen: int
    gate: ClampedSwiglu = ClampedSwiglu()
    bias: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(f"chosen: got {self.chosen}; accepted: 1 to {self.experts} experts")

    def build(self, d_model: int, dtype: DTypeLike, rngs: nnx.Rngs) -> Moe:
        return Moe(d_model, self, dtype, rngs)


class Moe(nnx.Module):
    """(B, T, D) -> (B, T, D)."""

    def __init__(self, d_model: int, config: MoeConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        experts = partial(Experts, config.experts, bias=config.bias, dtype=dtype, rngs=rngs)
        self.config = config
        self.router = nnx.Linear(
            d_model,
            config.experts,
            use_bias=config.bias,
            param_dtype=dtype,
            kernel_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.gate_up = experts(d_model, 2 * config.width)  # [gate | up]
        self.down = experts(config.width, d_model)

    def __call__(self, x: Array) -> Array:
        c, tokens = self.config, x.reshape(-1, x.shape[-1])
        top, picked = jax.lax.top_k(self.router(tokens).astype(jnp.float32), c.chosen)
        weights = jax.nn.softmax(top, axis=-1)
        # Pairs of a token and an expert, sorted by expert: each expert then has rows in sequence.
        order = jnp.argsort(picked.reshape(-1))
        expert = picked.reshape(-1)[order]
        sizes = jnp.bincount(expert, length=c.experts)
        gate, up = jnp.split(self.gate_up(tokens[order // c.chosen], expert, sizes), 2, axis=-1)
        mixed = self.down(c.gate(gate, up), expert, sizes)
        by_token = mixed[jnp.argsort(order)].reshape(*picked.shape, -1)
        return jnp.einsum("mkd,mk->md", by_token, weights).astype(x.dtype).reshape(x.shape)


class Experts(nnx.Module):
    """One linear layer for each expert: kernel (E, in, out), bias (E, out)."""

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        normal = nnx.initializers.normal(0.02)
        self.kernel = nnx.Param(normal(rngs.params(), (experts, inputs, outputs), dtype))
        self.bias = nnx.Param(jnp.zeros((experts, outputs), dtype)) if bias else None

    def __call__(self, rows: Array, expert: Array, sizes: Array) -> Array:
        """Rows (M, in), sorted by expert (M,), of which each has sizes (E,) -> (M, out)."""
        out = jax.lax.ragged_dot(rows, self.kernel[...], sizes)
        return out if self.bias is None else out + self.bias[...][expert]
