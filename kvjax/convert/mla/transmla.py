"""TransMLA: keys of all heads mixed so that few rope channels hold their energy (arXiv:2502.07864).

RoRoPE: channel pairs that RoPE turns at one frequency may be mixed over heads by
any orthogonal matrix, the same for both channels of the pairs, which commutes with RoPE. Principal
components of the keys bring their energy into the first of the mixed pairs, the slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvjax.convert.mla.heads import Basis, Heads, check_rope_dim, from_pairs, to_pairs
from kvjax.convert.mla.lowrank import Factors, balanced


@dataclass(frozen=True)
class TransMla:
    """Rope on the first slots of all heads' keys, as one rope key that all query heads share.

    Attributes:
      fold: neighbouring frequencies that are mixed as if they were one (FreqFold), which
        brings more energy into fewer slots, and with more than 1 is not exact.
    """

    fold: int = 1

    name = "transmla"

    def check(self, rope_dim: int, kv_heads: int, rotated: int) -> None:
        """ValueError unless so many channels can stay rotated."""
        if self.fold < 1 or rotated // 2 % self.fold:
            raise ValueError(
                f"fold: got {self.fold}; accepted: a divisor of {rotated // 2}, the frequencies"
            )
        check_rope_dim(rope_dim, kv_heads * rotated, "of all KV heads")

    def rope_heads(self, kv_heads: int) -> int:
        """One rope key for all heads."""
        return 1

    def unrotated(self, key_dim: int, rope_dim: int) -> int:
        """H', channels of a head's unrotated part: all, since all KV heads' keys are mixed."""
        return key_dim

    def basis(self, heads: Heads, rope_dim: int, moment: np.ndarray) -> Basis:
        """Coordinates of the keys.

        What stays rotated are the first slots of all frequencies, then the second ones, and so on,
        and of the last slots that there is room for those of the most energy.

        Args:
          heads: the layer's projections.
          rope_dim: R, channels that stay rotated.
          moment: (D + 1, D + 1), the mean of (x, 1) (x, 1)^T.
        """
        mix, energy = rotations(heads, self.fold, moment)
        by_energy = np.argsort(-energy, axis=0, kind="stable").T  # (slots, sets)
        order = [(index, slot) for slot, sets in enumerate(by_energy) for index in sets]
        rows = _slot_rows(mix, heads, self.fold)  # (sets, slots, 2, K, H)
        kept, left = order[: rope_dim // 2], order[rope_dim // 2 :]
        rope = from_pairs(np.stack([rows[at] for at in kept]), axis=0)
        nope = [rows[at] for at in left] + [_unrotated_rows(heads)]
        return Basis(
            rope=rope[None],
            pairs=np.array([[_frequency(mix[at], at[0], self.fold) for at in kept]]),
            nope=np.concatenate(nope),
            channels=np.tile(np.arange(heads.k.shape[1]), (len(heads.k), 1)),
        )

    def factors(
        self, keys: np.ndarray, values: np.ndarray, rank: int, moment: np.ndarray
    ) -> Factors:
        """Unrotated keys and values by way of one latent, by balanced principal components."""
        return balanced(keys, values, rank, moment)


def rotations(heads: Heads, fold: int, moment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Orthogonal matrices over the pairs of all heads that share a frequency, or `fold` of them.

    Returns:
      mix (sets, slots, pairs): what each slot is made of, with pairs in the order (fold, K).
      energy (sets, slots): the mean square of each slot's keys, the largest first.
    """
    pairs = _in_sets(to_pairs(heads.k[:, : heads.rotated], axis=1), fold)
    gram = np.einsum("sacd,de,sbce->sab", pairs, moment, pairs, optimize=True)
    energy, vectors = np.linalg.eigh(gram)
    return vectors.swapaxes(1, 2)[:, ::-1], np.maximum(energy[:, ::-1], 0)


def _in_sets(pairs: np.ndarray, fold: int) -> np.ndarray:
    """Pairs (K, frequencies, ...) -> (sets, fold * K, ...)."""
    kv_heads, frequencies, *rest = pairs.shape
    sets = pairs.reshape(kv_heads, frequencies // fold, fold, *rest)
    return np.moveaxis(sets, 0, 2).reshape(frequencies // fold, fold * kv_heads, *rest)


def _slot_rows(mix: np.ndarray, heads: Heads, fold: int) -> np.ndarray:
    """Each slot's two channels in those of all keys: (sets, slots, 2, K, H)."""
    kv_heads, key_dim, _ = heads.k.shape
    channels = np.zeros((kv_heads, heads.rotated, kv_heads, key_dim))
    for head in range(kv_heads):
        channels[head, :, head, : heads.rotated] = np.eye(heads.rotated)
    pairs = _in_sets(to_pairs(channels, axis=1), fold)
    return np.einsum("sab,sbckh->sackh", mix, pairs)


def _unrotated_rows(heads: Heads) -> np.ndarray:
    """Those of channels that RoPE never turned: (M, K, H)."""
    kv_heads, key_dim, _ = heads.k.shape
    rows = np.eye(kv_heads * key_dim).reshape(kv_heads, key_dim, kv_heads, key_dim)
    return rows[:, heads.rotated :].reshape(-1, kv_heads, key_dim)


def _frequency(slot: np.ndarray, index: int, fold: int) -> int:
    """That of the set's frequencies which a slot (fold * K,) has most of."""
    shares = np.square(slot).reshape(fold, -1).sum(axis=1)
    return int(index * fold + shares.argmax())
