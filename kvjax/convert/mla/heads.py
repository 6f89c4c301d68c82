"""One layer's projections as heads, and keys of all heads in other coordinates.

All in float64, and with the biases as the last column: projections are of x and a constant 1, so
that what mixes channels mixes their biases too. Rotated channels are paired as (i, i + half).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Heads:
    """What attention makes of x and 1, before it rotates.

    Attributes:
      q, k: (N, H, D + 1) and (K, H, D + 1).
      v: (K, HV, D + 1).
      rotated: channels of each query and key that RoPE turns, the first ones; even.
      magnitude: what RoPE multiplies these by, in queries and in keys (YaRN); mostly 1.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    rotated: int
    magnitude: float = 1.0

    @property
    def group(self) -> int:
        """G, query heads that read one KV head."""
        return len(self.q) // len(self.k)

    @property
    def unrotated_k(self) -> np.ndarray:
        """Keys (K, H, D + 1) that score without RoPE what they score with it at equal positions."""
        factors = np.ones((self.k.shape[1], 1))
        factors[: self.rotated] = self.magnitude**2
        return self.k * factors


@dataclass(frozen=True)
class Basis:
    """Coordinates for the keys of all KV heads: some stay rotated, the others are so no more.

    Rows are linear forms in the channels of all keys of a token, and all together orthonormal: the
    product of a query head and its key is the sum, over rows, of the products of what the row makes
    of the one (as if the other heads' channels were 0) and of all keys.

    Attributes:
      rope: (J, R, K, H), of J rope keys; query head n reads key n // (N / J).
      pairs: (J, R/2), which of the frequencies each pair has that stays rotated.
      nope: (M, K, H).
      channels: (K, H'), those channels of each KV head that `nope` has something of, or more.
    """

    rope: np.ndarray
    pairs: np.ndarray
    nope: np.ndarray
    channels: np.ndarray

    def rope_keys(self, heads: Heads) -> np.ndarray:
        """(J, R, D + 1)."""
        return np.einsum("jrkh,khd->jrd", self.rope, heads.k, optimize=True)

    def rope_queries(self, heads: Heads) -> np.ndarray:
        """(N, R, D + 1)."""
        count, group = len(heads.q), heads.group
        per_key = count // len(self.rope)
        return np.stack([self.rope[n // per_key, :, n // group] @ heads.q[n] for n in range(count)])

    def nope_keys(self, heads: Heads) -> np.ndarray:
        """(M, D + 1)."""
        return np.einsum("mkh,khd->md", self.nope, heads.unrotated_k, optimize=True)

    def nope_queries(self, heads: Heads) -> np.ndarray:
        """(N, H', D + 1), which score against `head_keys`."""
        own = np.repeat(self.channels, heads.group, axis=0)
        return np.take_along_axis(heads.q, own[:, :, None], axis=1)

    def head_keys(self, nope: np.ndarray) -> np.ndarray:
        """What is made of all heads' unrotated keys (M, ...), for each KV head (K, H', ...)."""
        own = np.take_along_axis(self.nope.transpose(1, 2, 0), self.channels[:, :, None], axis=1)
        return np.tensordot(own, nope, axes=1)


def to_pairs(x: np.ndarray, axis: int) -> np.ndarray:
    """Channels (..., R, ...) -> pairs (..., R/2, 2, ...)."""
    return np.stack(np.split(x, 2, axis=axis), axis=axis % x.ndim + 1)


def from_pairs(x: np.ndarray, axis: int) -> np.ndarray:
    """Pairs (..., R/2, 2, ...) -> channels (..., R, ...); `axis` is that of the pairs."""
    axis %= x.ndim
    first, second = np.moveaxis(x, axis + 1, 0)
    return np.concatenate([first, second], axis=axis)


def check_rope_dim(rope_dim: int, most: int, of: str) -> None:
    """ValueError unless rope_dim is an even number of channels from 2 to `most`."""
    if rope_dim % 2 or not 2 <= rope_dim <= most:
        raise ValueError(
            f"rope_dim: got {rope_dim}; accepted: an even number from 2 to {most}, the rotated "
            f"channels {of}"
        )
