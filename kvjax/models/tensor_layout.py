"""How families store parameters, against the canonical form.

In it kernels are (in, out), head h takes columns h*H to (h+1)*H of a projection's last axis, a
fused projection's last axis is [q | k | v], and rotated channels are a head's first halves of all
pairs, then their second halves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvjax.nn import AttentionConfig, LatentAttentionConfig
from kvjax.nn.sharing import AnyAttentionConfig

type Shape = tuple[int, ...]
# Settings of the layer that a tensor is of; None for one that is of none.
type OfLayer = AnyAttentionConfig | None


class TensorLayout(Protocol):
    """How a family stores a parameter; `read` and `write` are inverse."""

    def shape(self, shape: Shape, attention: OfLayer) -> Shape:
        """Shape of the stored tensor that a parameter of this canonical shape is in."""
        ...

    def read(self, stored: np.ndarray, attention: OfLayer) -> np.ndarray:
        """Stored -> canonical; a view where it can be."""
        ...

    def write(self, parameter: np.ndarray, attention: OfLayer, stored: np.ndarray) -> None:
        """Canonical -> its place in a stored tensor, C-contiguous, that may hold others as well."""
        ...


class Same:
    """Stored as it is."""

    def shape(self, shape: Shape, attention: OfLayer) -> Shape:
        return shape

    def read(self, stored: np.ndarray, attention: OfLayer) -> np.ndarray:
        return stored

    def write(self, parameter: np.ndarray, attention: OfLayer, stored: np.ndarray) -> None:
        stored[...] = parameter


class Transposed:
    """torch.nn.Linear stores (out, in)."""

    def shape(self, shape: Shape, attention: OfLayer) -> Shape:
        return shape[::-1]

    def read(self, stored: np.ndarray, attention: OfLayer) -> np.ndarray:
        return stored.T

    def write(self, parameter: np.ndarray, attention: OfLayer, stored: np.ndarray) -> None:
        stored[...] = parameter.T


class EachTransposed:
    """A torch.nn.Linear for each expert, (E, out, in)."""

    def shape(self, shape: Shape, attention: OfLayer) -> Shape:
        return (shape[0], shape[2], shape[1])

    def read(self, stored: np.ndarray, attention: OfLayer) -> np.ndarray:
        return stored.swapaxes(1, 2)

    def write(self, parameter: np.ndarray, attention: OfLayer, stored: np.ndarray) -> None:
        stored[...] = parameter.swapaxes(1, 2)


class Interleaved:
    """The two halves of the last axis in turn, number by number: [a0, b0, a1, b1, ...]."""

    def shape(self, shape: Shape, attention: OfLayer) -> Shape:
        return shape

    def read(self, stored: np.ndarray, attention: OfLayer) -> np.ndarray:
        return np.concatenate([stored[..., 0::2], stored[..., 1::2]], axis=-1)

    def write(self, parameter: np.ndarray, attention: OfLayer, stored: np.ndarray) -> None:
        stored[..., 0::2], stored[..., 1::2] = np.split(parameter, 2, axis=-1)


class GroupedByKVHead:
    """Fused q, k, v, (out, in), whose rows are [its queries; k; v] for one KV head after another.

    With as many KV heads as query heads this is GPT-NeoX's interleaving, [q; k; v] for each head.
    """

    def shape(self, shape: Shape, attention: OfLayer) -> Shape:
        return shape[::-1]

    def read(self, stored: np.ndarray, attention: OfLayer) -> np.ndarray:
        assert attention is not None
        a, rest = attention, stored.shape[1:]
        group = a.query_heads // a.kv_heads
        blocks = stored.reshape(a.kv_heads, group + 2, a.key_dim, *rest)
        parts = (blocks[:, :group], blocks[:, group], blocks[:, group + 1])
        return np.concatenate([part.reshape(-1, *rest) for part in parts]).T

    def write(self, parameter: np.ndarray, attention: OfLayer, stored: np.ndarray) -> None:
        assert isinstance(attention, AttentionConfig)
        a, rest = attention, stored.shape[1:]
        parts = np.split(parameter.T, np.cumsum(a.qkv_widths)[:2])
        blocks = [part.reshape(a.kv_heads, -1, a.key_dim, *rest) for part in parts]
        stored[...] = np.concatenate(blocks, axis=1).reshape(stored.shape)


@dataclass(frozen=True)
class PairsInHeads:
    """(out, in), where the two channels of a pair that RoPE turns are side by side.

    Scores do not depend on the order of channels that queries and keys have in common.

    Attributes:
      channels: those of a head, and how many of them are rotated, which are its last.
    """

    channels: Callable[[AnyAttentionConfig], tuple[int, int]]

    def shape(self, shape: Shape, attention: OfLayer) -> Shape:
        return shape[::-1]

    def read(self, stored: np.ndarray, attention: OfLayer) -> np.ndarray:
        parameter = stored.copy()
        into, rotated = (self._rotated(x, attention) for x in (parameter, stored))
        half = rotated.shape[1] // 2
        into[:, :half], into[:, half:] = rotated[:, 0::2], rotated[:, 1::2]
        return parameter.T

    def write(self, parameter: np.ndarray, attention: OfLayer, stored: np.ndarray) -> None:
        stored[...] = parameter.T
        rotated = self._rotated(stored, attention)
        rotated[:, 0::2], rotated[:, 1::2] = np.split(rotated.copy(), 2, axis=1)

    def _rotated(self, stored: np.ndarray, attention: OfLayer) -> np.ndarray:
        """The rotated channels of each head, (heads, channels, in): a view."""
        assert attention is not None
        width, rotated = self.channels(attention)
        return stored.reshape(-1, width, *stored.shape[1:])[:, width - rotated :]


class KeysUp:
    """A head's way up from the latent to keys and values, (out, in), [keys; values] by head.

    This is the keys' part of it, (N, H, L).
    """

    def shape(self, shape: Shape, attention: OfLayer) -> Shape:
        assert isinstance(attention, LatentAttentionConfig)
        a = attention
        return (a.query_heads * (a.head_dim + a.head_value_dim), a.latent_rank)

    def read(self, stored: np.ndarray, attention: OfLayer) -> np.ndarray:
        assert isinstance(attention, LatentAttentionConfig)
        return _by_head(stored, attention)[:, : attention.head_dim]

    def write(self, parameter: np.ndarray, attention: OfLayer, stored: np.ndarray) -> None:
        self.read(stored, attention)[...] = parameter


class ValuesUp(KeysUp):
    """The values' part of the same, (N, L, HV)."""

    def read(self, stored: np.ndarray, attention: OfLayer) -> np.ndarray:
        assert isinstance(attention, LatentAttentionConfig)
        return _by_head(stored, attention)[:, attention.head_dim :].swapaxes(1, 2)


def _by_head(stored: np.ndarray, attention: LatentAttentionConfig) -> np.ndarray:
    return stored.reshape(attention.query_heads, -1, stored.shape[-1])


def _of_queries(attention: AnyAttentionConfig) -> tuple[int, int]:
    assert isinstance(attention, LatentAttentionConfig)
    return attention.head_dim + attention.rope_dim, attention.rope_dim


def _after_latent(attention: AnyAttentionConfig) -> tuple[int, int]:
    assert isinstance(attention, LatentAttentionConfig)
    return attention.latent_rank + attention.rope_dim, attention.rope_dim


SAME, TRANSPOSED, EACH_TRANSPOSED = Same(), Transposed(), EachTransposed()
INTERLEAVED, GROUPED_BY_KV_HEAD = Interleaved(), GroupedByKVHead()
KEYS_UP, VALUES_UP = KeysUp(), ValuesUp()
# Of whole heads; of the queries of latent attention; and of its latent with the rope key after it.
PAIRS_IN_HEADS = PairsInHeads(lambda attention: (attention.key_dim, attention.key_dim))
PAIRS_IN_QUERIES, PAIRS_AFTER_LATENT = PairsInHeads(_of_queries), PairsInHeads(_after_latent)
