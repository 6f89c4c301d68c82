"""MHA2MLA: partial RoPE, and one latent for the other keys and the values (arXiv:2502.14837)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvjax.convert.mla.heads import Basis, Heads, check_rope_dim, to_pairs
from kvjax.convert.mla.lowrank import Factors, joint, split


@dataclass(frozen=True)
class Mha2Mla:
    """Rope on some channel pairs of each KV head, which keeps a rope key of its own.

    Attributes:
      select: which pairs stay rotated: those of the "high"est or the "low"est
        frequencies; "uniform", every so-manieth; or "2-norm", those of each head whose queries and
        keys are the largest: by the product of their root mean squares, where the paper has the
        mean of the product.
      svd: how unrotated keys and values are factored: "joint", by one latent for
        both, or "split", by half a latent for each.
    """

    select: str = "2-norm"
    svd: str = "joint"

    name = "mha2mla"

    def check(self, rope_dim: int, kv_heads: int, rotated: int) -> None:
        """ValueError unless so many channels of each head can stay rotated."""
        for field, given, accepted in (("select", self.select, SELECT), ("svd", self.svd, SVD)):
            if given not in accepted:
                raise ValueError(f"{field}: got {given!r}; accepted: {', '.join(accepted)}")
        check_rope_dim(rope_dim, rotated, "of one KV head")

    def rope_heads(self, kv_heads: int) -> int:
        """A rope key for each KV head."""
        return kv_heads

    def unrotated(self, key_dim: int, rope_dim: int) -> int:
        """H', channels of a head's unrotated part."""
        return key_dim - rope_dim

    def basis(self, heads: Heads, rope_dim: int, moment: np.ndarray) -> Basis:
        """Coordinates of the keys; arguments are those of `TransMla.basis`."""
        kv_heads, key_dim, _ = heads.k.shape
        pairs = SELECT[self.select](heads, rope_dim // 2, moment)
        half = heads.rotated // 2
        own = np.concatenate([pairs, half + pairs], axis=1)  # (K, R) channels
        rest = np.stack([np.setdiff1d(np.arange(key_dim), channels) for channels in own])
        channels = np.eye(kv_heads * key_dim).reshape(kv_heads, key_dim, kv_heads, key_dim)
        rows = [
            np.take_along_axis(channels, index[:, :, None, None], axis=1) for index in (own, rest)
        ]
        return Basis(rows[0], pairs, rows[1].reshape(-1, kv_heads, key_dim), rest)

    def factors(
        self, keys: np.ndarray, values: np.ndarray, rank: int, moment: np.ndarray
    ) -> Factors:
        """Unrotated keys and values by way of one latent, by singular values of the weights."""
        return SVD[self.svd](keys, values, rank)


def _high(heads: Heads, count: int, moment: np.ndarray) -> np.ndarray:
    return _same(heads, np.arange(count))


def _low(heads: Heads, count: int, moment: np.ndarray) -> np.ndarray:
    return _same(heads, np.arange(heads.rotated // 2 - count, heads.rotated // 2))


def _uniform(heads: Heads, count: int, moment: np.ndarray) -> np.ndarray:
    return _same(heads, np.arange(count) * (heads.rotated // 2) // count)


def _same(heads: Heads, pairs: np.ndarray) -> np.ndarray:
    """The same pairs of every head."""
    return np.tile(pairs, (len(heads.k), 1))


def _largest(heads: Heads, count: int, moment: np.ndarray) -> np.ndarray:
    q = _mean_squares(heads.q[:, : heads.rotated], moment).reshape(len(heads.k), heads.group, -1)
    k = _mean_squares(heads.k[:, : heads.rotated], moment)
    products = np.sqrt(q * k[:, None]).mean(axis=1)
    return np.sort(np.argsort(-products, axis=1, kind="stable")[:, :count], axis=1)


def _mean_squares(x: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Of each pair of channels (heads, R, D + 1): (heads, R/2)."""
    pairs = to_pairs(x, axis=1)
    return np.einsum("hpcd,hpcd->hp", pairs @ moment, pairs)


type _Select = Callable[[Heads, int, np.ndarray], np.ndarray]
SELECT: dict[str, _Select] = {
    "2-norm": _largest,
    "high": _high,
    "low": _low,
    "uniform": _uniform,
}
SVD: dict[str, Callable[[np.ndarray, np.ndarray, int], Factors]] = {"joint": joint, "split": split}
