"""A mixture of experts: each token passes through the few gated MLPs that a router picks for it.

The products are `jax.lax.ragged_dot`, for which accelerators have kernels that do the chosen
experts' work alone. On CPUs XLA multiplies every row with every expert and copies the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from kvjax.nn.mlp import ACTIVATIONS, MlpConfig
from kvjax.nn.routers import Router


@dataclass(frozen=True)
class Gated:
    """act(gate) * up."""

    activation: str = "silu"

    def __call__(self, gate: Array, up: Array) -> Array:
        return ACTIVATIONS[self.activation](gate) * up


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
      router: how they are chosen and weighed.
      gate: (gate, up) -> what the down projection reads.
      bias: whether the router and the experts' projections carry biases.
      shared: an MLP that every token passes beside its experts (DeepSeek); None for none.
    """

    width: int
    experts: int
    chosen: int
    router: Router = field(default_factory=Router)
    gate: Gated | ClampedSwiglu = Gated()
    bias: bool = False
    shared: MlpConfig | None = None

    def __post_init__(self) -> None:
        self.router.check(self.experts, self.chosen)

    def build(self, d_model: int, dtype: DTypeLike, rngs: nnx.Rngs) -> Moe:
        return Moe(d_model, self, dtype, rngs)


class Moe(nnx.Module):
    """(B, T, D) -> (B, T, D)."""

    def __init__(self, d_model: int, config: MoeConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.router = nnx.Linear(
            d_model,
            config.experts,
            use_bias=config.bias,
            param_dtype=dtype,
            # Logits rounded to bf16 would pick other experts.
            preferred_element_type=jnp.float32,
            kernel_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        if config.router.corrected:
            # In float32 whatever the dtype: scores differ by less than its steps in bf16.
            self.correction = nnx.Param(jnp.zeros(config.experts, jnp.float32))
        self.experts = Experts(d_model, config, dtype, rngs)
        if config.shared is not None:
            self.shared = config.shared.build(d_model, dtype, rngs)

    def __call__(self, x: Array) -> Array:
        c, tokens = self.config, x.reshape(-1, x.shape[-1])
        correction = self.correction[...] if c.router.corrected else None
        picked, weights = c.router(self.router(tokens), c.chosen, correction)
        # Pairs of a token and an expert, sorted by expert: each expert then has rows in sequence.
        order = jnp.argsort(picked.reshape(-1))
        expert = picked.reshape(-1)[order]
        sizes = jnp.bincount(expert, length=c.experts)
        mixed = self.experts(tokens[order // c.chosen], expert, sizes)
        by_token = mixed[jnp.argsort(order)].reshape(*picked.shape, -1)
        out = jnp.einsum("mkd,mk->md", by_token, weights).astype(x.dtype).reshape(x.shape)
        return out if c.shared is None else out + self.shared(x)


class Experts(nnx.Module):
    """The gated MLPs, all of them at once."""

    def __init__(self, d_model: int, config: MoeConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        linear = partial(LinearEach, config.experts, bias=config.bias, dtype=dtype, rngs=rngs)
        self.gate = config.gate
        self.gate_up = linear(d_model, 2 * config.width)  # [gate | up]
        self.down = linear(config.width, d_model)

    def __call__(self, rows: Array, expert: Array, sizes: Array) -> Array:
        """Rows (M, D), sorted by their expert (M,), of which each has sizes (E,) -> (M, D)."""
        gate, up = jnp.split(self.gate_up(rows, expert, sizes), 2, axis=-1)
        return self.down(self.gate(gate, up), expert, sizes)


class LinearEach(nnx.Module):
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
        """Rows (M, in), expert and sizes as above -> (M, out)."""
        out = jax.lax.ragged_dot(rows, self.kernel[...], sizes)
        return out if self.bias is None else out + self.bias[...][expert]
