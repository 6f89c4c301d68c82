"""Keys and values by way of one latent of low rank, in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Factors(NamedTuple):
    """keys ≈ key_up @ down, and values ≈ value_up @ down.

    Attributes:
      down: (L, D).
      key_up: (M, L).
      value_up: (K * HV, L).
    """

    down: np.ndarray
    key_up: np.ndarray
    value_up: np.ndarray


def balanced(keys: np.ndarray, values: np.ndarray, rank: int, moment: np.ndarray) -> Factors:
    """Principal components of keys and values together, which weigh the same (TransMLA).

    Keys are divided by the ratio of their root mean square to that of the values, and the way up to
    them multiplied by it: else the larger of the two, mostly keys, would take all components.

    Args:
      keys, values: (M, D) and (K * HV, D), projections of x.
      rank: L, up to M + K * HV.
      moment: (D, D), the mean of x x^T.
    """
    squares = [_mean_square(part, moment) for part in (keys, values)]
    ratio = math.sqrt(squares[0] / squares[1]) if all(squares) else 1.0
    both = np.concatenate([keys / ratio, values])
    _, vectors = np.linalg.eigh(both @ moment @ both.T)
    up = vectors[:, ::-1][:, :rank]
    return Factors(up.T @ both, ratio * up[: len(keys)], up[len(keys) :])


def joint(keys: np.ndarray, values: np.ndarray, rank: int) -> Factors:
    """The best approximation of both weights together (MHA2MLA)."""
    up, down = truncated(np.concatenate([keys, values]), rank)
    return Factors(down, up[: len(keys)], up[len(keys) :])


def split(keys: np.ndarray, values: np.ndarray, rank: int) -> Factors:
    """The best of either by itself: half of the latent for keys, or as much as either has use for.

    The latent is theirs one after the other.
    """
    of_keys = min(max(rank // 2, rank - len(values)), len(keys))
    of_values = rank - of_keys
    (key_up, key_down), (value_up, value_down) = (
        truncated(keys, of_keys),
        truncated(values, of_values),
    )
    return Factors(
        np.concatenate([key_down, value_down]),
        np.pad(key_up, ((0, 0), (0, of_values))),
        np.pad(value_up, ((0, 0), (of_keys, 0))),
    )


def truncated(weight: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """weight (M, D) ≈ up (M, rank) @ down (rank, D), whose rows are orthonormal.

    Past the rank of the weight, ways up and down are 0.
    """
    u, s, vt = np.linalg.svd(weight, full_matrices=False)
    missing = max(rank - len(s), 0)
    up, down = (u * s)[:, :rank], vt[:rank]
    return np.pad(up, ((0, 0), (0, missing))), np.pad(down, ((0, missing), (0, 0)))


def relative_error(weight: np.ndarray, approximation: np.ndarray, moment: np.ndarray) -> float:
    """|| (weight - approximation) x || / || weight x ||, root mean squares; 0 where that is 0.

    Args:
      weight, approximation: (M, D).
      moment: (D, D), the mean of x x^T.
    """
    whole = _mean_square(weight, moment)
    error = _mean_square(weight - approximation, moment)
    return math.sqrt(error / whole) if whole else 0.0


def _mean_square(weight: np.ndarray, moment: np.ndarray) -> float:
    """Of weight @ x, summed over its channels."""
    return max(float(np.sum(weight @ moment * weight)), 0.0)
