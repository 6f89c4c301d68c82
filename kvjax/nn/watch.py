"""Watching attention layers at work, in a copy of the model: the model itself stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.nn.attention import Attention
from kvjax.nn.decoder import Decoder


class Projections(NamedTuple):
    """What a layer makes of T tokens a row, at all positions, padding included.

    Attributes:
      q: (B, T, N, H), as they attend: normed and rotated.
      k, v: (B, T, K, H) and (B, T, K, HV), as they are written to a cache.
      unrotated: (B, T, N, H), the queries before they are rotated.
    """

    q: Array
    k: Array
    v: Array
    unrotated: Array


def attention_modules(model: Decoder) -> list[Attention]:
    """Of each layer; ValueError where one is of another kind."""
    modules = []
    for i, layer in enumerate(model.layers):
        if not isinstance(layer.attention, Attention):
            raise ValueError(
                f"layers[{i}].attention: got {type(layer.attention).__name__}; accepted: Attention"
            )
        modules.append(layer.attention)
    return modules


def with_attention(model: Decoder, wrap: Callable[[Any], Any]) -> Decoder:
    """A copy of the model in which `wrap` has replaced each layer's attention module."""
    # By way of its leaves, so that the modules of the caller's stay as they are.
    copy = jax.tree.unflatten(*reversed(jax.tree.flatten(model)))
    for layer in copy.layers:
        layer.attention = wrap(layer.attention)
    return copy


def projections(model: Decoder, tokens: Array, count: Array) -> tuple[Projections | None, ...]:
    """Each layer's queries, keys and values of whole texts, attended exactly and without a cache.

    To be called inside jit.

    Args:
      model: a decoder whose layers are `Attention`.
      tokens: (B, T) int32, right-padded.
      count: (B,) int32, the real tokens of each row.

    Returns:
      One entry a layer; None where it makes no keys and values but reads another's.

    Raises:
      ValueError: for a layer of another kind, or more tokens than learned positions.
    """
    attention_modules(model)
    seen: list[Projections | None] = []

    @dataclass(frozen=True)
    class Noting:
        attention: Attention

        def __call__(self, x: Array, positions: Array, *rest: Any) -> Any:
            seen.append(_projections(self.attention, x, positions))
            return self.attention(x, positions, *rest)

    with_attention(model, Noting).hidden(jnp.asarray(tokens), count=count)
    return tuple(seen)


def attention_inputs(model: Decoder, tokens: Array) -> tuple[Array, ...]:
    """What the attention of each layer is given of whole texts (B, T), without padding: (B, T, D).

    To be called inside jit.
    """
    seen: list[Array] = []

    @dataclass(frozen=True)
    class Noting:
        attention: Any

        def __call__(self, x: Array, *rest: Any) -> Any:
            seen.append(x)
            return self.attention(x, *rest)

    with_attention(model, Noting).hidden(tokens)
    return tuple(seen)


def _projections(module: Attention, x: Array, positions: Array) -> Projections | None:
    if module.config.shares_with is not None:
        return None
    q, k, v = module.heads(x)
    return Projections(module.rotate(q, positions), module.rotate(k, positions), v, q)
