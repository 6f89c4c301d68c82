"""One layer: from the heads' projections to those of latent attention."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from kvjax.convert.mla.heads import Basis, Heads, from_pairs, to_pairs
from kvjax.convert.mla.lowrank import Factors, relative_error


class Way(Protocol):
    """A way to convert: which channels stay rotated, and how the others are factored.

    A dataclass, whose fields are its settings.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """For reports."""
        ...

    def check(self, rope_dim: int, kv_heads: int, rotated: int) -> None:
        """ValueError unless the settings fit K heads with so many rotated channels."""
        ...

    def rope_heads(self, kv_heads: int) -> int:
        """J, rope keys of a token."""
        ...

    def unrotated(self, key_dim: int, rope_dim: int) -> int:
        """H', channels of a head's unrotated part."""
        ...

    def basis(self, heads: Heads, rope_dim: int, moment: np.ndarray) -> Basis:
        """Coordinates of the keys."""
        ...

    def factors(
        self, keys: np.ndarray, values: np.ndarray, rank: int, moment: np.ndarray
    ) -> Factors:
        """Unrotated keys and values by way of one latent."""
        ...


class Losses(NamedTuple):
    """How near latent attention of a layer is to what it was made of.

    Attributes:
      key_error, value_error: of unrotated keys and of values, by `relative_error`.
      rope_energy: share of the keys' mean square that stays rotated, biases included.
    """

    key_error: float
    value_error: float
    rope_energy: float


class Latent(NamedTuple):
    """Latent attention of one layer.

    Attributes:
      q: (N, H' + R, D + 1); the last column, here and below, is the bias.
      down: (L + J R, D + 1), to latent and rope keys; of all rope keys the first halves come first.
      k_up, v_up: (N, H', L) and (N, L, HV).
      value_bias: (N, HV), what is added to every head's output.
      losses: of the conversion.
    """

    q: np.ndarray
    down: np.ndarray
    k_up: np.ndarray
    v_up: np.ndarray
    value_bias: np.ndarray
    losses: Losses


def to_latent(heads: Heads, way: Way, basis: Basis, rank: int, moment: np.ndarray) -> Latent:
    """Convert one layer.

    Three kinds of biases need no latent. Those of unrotated keys add the same to all scores of a
    query, which softmax does not see; those of values add the same to every output, since the
    weights of a query sum to 1; those of rope keys stay as they are. So what is factored, and
    measured, are the products with x alone.

    Args:
      heads: the projections.
      way: `TransMla` or `Mha2Mla`.
      basis: the way's, of these heads.
      rank: L.
      moment: (D + 1, D + 1), the mean of (x, 1) (x, 1)^T over tokens.
    """
    without_bias = moment[:-1, :-1]
    kv_heads, value_dim, _ = heads.v.shape
    keys = basis.nope_keys(heads)[:, :-1]
    values = heads.v[..., :-1].reshape(kv_heads * value_dim, -1)
    factors = way.factors(keys, values, rank, without_bias)
    rope = from_pairs(np.concatenate(to_pairs(basis.rope_keys(heads), axis=1)), axis=0)
    v_up = factors.value_up.reshape(kv_heads, value_dim, rank).swapaxes(1, 2)
    return Latent(
        q=np.concatenate([basis.nope_queries(heads), basis.rope_queries(heads)], axis=1),
        down=np.concatenate([np.pad(factors.down, ((0, 0), (0, 1))), rope]),
        k_up=np.repeat(basis.head_keys(factors.key_up), heads.group, axis=0),
        v_up=np.repeat(v_up, heads.group, axis=0),
        value_bias=np.repeat(heads.v[..., -1], heads.group, axis=0),
        losses=Losses(
            relative_error(keys, factors.key_up @ factors.down, without_bias),
            relative_error(values, factors.value_up @ factors.down, without_bias),
            _energy(rope, moment) / _energy(heads.k, moment),
        ),
    )


def _energy(rows: np.ndarray, moment: np.ndarray) -> float:
    """Mean square of what rows (..., D + 1) make of (x, 1), summed over them."""
    return float(np.sum(rows @ moment * rows))
