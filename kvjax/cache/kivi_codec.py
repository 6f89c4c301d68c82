"""The codes of KIVI: a few bits a number, asymmetric, in groups that share scale and zero.

Channels of keys differ far more than tokens do, so that keys share a scale along tokens, per
channel, and values along channels, per token (Liu et al. 2024, arXiv:2402.02750, section 3).
code = round((x - zero) / scale), where zero is the smallest number of its group and
scale = (largest - zero) / (2**bits - 1), both in fp16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from kvjax import sizing
from kvjax.cache.bits import pack, unpack
from kvjax.cache.protocol import Record


@dataclass(frozen=True)
class Kivi:
    """Asks for KIVI.

    Attributes:
      bits: of a code, 2 or 4.
      group: G; tokens of one key channel, or channels of one value token, that share a scale.
      residual: R, newest tokens of which room is kept in 16 bits; a multiple of G.

    Raises:
      ValueError: for other bits, or a residual that groups do not fill.
    """

    bits: int = 2
    group: int = 32
    residual: int = 128

    def __post_init__(self) -> None:
        if self.bits not in (2, 4):
            raise ValueError(f"bits: got {self.bits}; accepted: 2, 4")
        if self.group < 1:
            raise ValueError(f"group: got {self.group}; accepted: at least 1")
        if self.residual < self.group or self.residual % self.group:
            raise ValueError(
                f"residual: got {self.residual}; accepted: multiples of group={self.group}, since "
                f"tokens become codes {self.group} at a time"
            )

    @property
    def name(self) -> str:
        return f"kivi{self.bits}"

    @property
    def spec(self) -> sizing.Kivi:
        """Its byte arithmetic."""
        return sizing.Kivi(self.name, self.bits, self.group, self.residual)

    def slots(self, capacity: int) -> int:
        """The least number of tokens, at least `capacity`, that fill residual and groups."""
        return self.residual + -(-max(capacity - self.residual, 0) // self.group) * self.group

    def encoded(self, n: Array) -> Array:
        """How many of n tokens are codes: no more groups than leave at most R exact."""
        return -(-jnp.maximum(n - self.residual, 0) // self.group) * self.group

    def check_widths(self, key_dim: int, value_dim: int) -> None:
        """Raise ValueError for heads whose codes do not fill bytes, or values not their groups."""
        a_byte = 8 // self.bits
        for name, dim in (("key_dim", key_dim), ("value_dim", value_dim)):
            if dim % a_byte:
                raise ValueError(
                    f"{name}: got {dim}; accepted: multiples of {a_byte}, since codes of "
                    f"{self.bits} bits fill whole bytes"
                )
        if value_dim % self.group:
            raise ValueError(
                f"value_dim: got {value_dim}; accepted: multiples of group={self.group}, of which "
                f"each has a scale, or another group: Kivi(group=...)"
            )

    def empty(
        self,
        batch: int,
        rows: int,
        groups: int,
        kv_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
    ) -> dict[str, Array]:
        """What `encode` gives of so many groups of so many rows, and a residual; all zero.

        The residual is k_exact (B, K, R, H) and v_exact (B, K, R, HV) in fp16.
        """
        sizes = {"k": (kv_heads, key_dim), "v": (value_heads, value_dim)}
        one = (jnp.zeros((1, heads, 1, self.group, dim)) for heads, dim in sizes.values())
        shapes = jax.eval_shape(self.encode, Record(*one))
        # One buffer a leaf: a buffer shared by two leaves could not be donated.
        return {
            name: jnp.zeros((rows, leaf.shape[1], groups, *leaf.shape[3:]), leaf.dtype)
            for name, leaf in shapes.items()
        } | {
            f"{name}_exact": jnp.zeros((batch, heads, self.residual, dim), jnp.float16)
            for name, (heads, dim) in sizes.items()
        }

    def encode(self, groups: Record) -> dict[str, Array]:
        """Codes, scales and zeros of groups k (B, K, M, G, H) and v (B, K, M, G, HV) in fp16.

        Returns:
          k and v (B, K, M, G, bytes); k_scale and k_zero (B, K, M, H); v_scale and v_zero
          (B, K, M, G, HV / G).
        """
        k, k_scale, k_zero = _quantise(groups.k, self.bits, axis=-2)
        v, v_scale, v_zero = _quantise(self._parted(groups.v), self.bits, axis=-1)
        return {
            "k": pack(k, self.bits),
            "k_scale": k_scale,
            "k_zero": k_zero,
            "v": pack(v.reshape(groups.v.shape), self.bits),
            "v_scale": v_scale,
            "v_zero": v_zero,
        }

    def decode(self, leaves: Mapping[str, Array]) -> Record:
        """k (B, K, M, G, H) and v (B, K, M, G, HV) in f32, of what `encode` gave."""
        wide = {name: x.astype(jnp.float32) for name, x in leaves.items() if name not in "kv"}
        k, v = (unpack(leaves[name], self.bits).astype(jnp.float32) for name in "kv")
        k = k * wide["k_scale"][..., None, :] + wide["k_zero"][..., None, :]
        parted = self._parted(v) * wide["v_scale"][..., None] + wide["v_zero"][..., None]
        return Record(k, parted.reshape(v.shape))

    def _parted(self, v: Array) -> Array:
        """(..., HV) -> (..., HV / G, G), of which the last axis shares a scale."""
        return v.reshape(*v.shape[:-1], -1, self.group)


_HALF_MAX = float(jnp.finfo(jnp.float16).max)


def to_half(x: Array) -> Array:
    """The nearest fp16; what none can hold becomes the largest."""
    return jnp.clip(x.astype(jnp.float32), -_HALF_MAX, _HALF_MAX).astype(jnp.float16)


# By the names that a codec may be asked for with.
KIVI = {kivi.name: kivi for kivi in (Kivi(2), Kivi(4))}


def _quantise(x: Array, bits: int, axis: int) -> tuple[Array, Array, Array]:
    """fp16 x -> uint8 codes, and fp16 scale and zero without `axis`, along which they are shared.

    A group of equal numbers has scale 0 and decodes to itself.
    """
    most = 2**bits - 1
    wide = x.astype(jnp.float32)
    zero, largest = wide.min(axis, keepdims=True), wide.max(axis, keepdims=True)
    # Products, since XLA makes such of some divisions, and then rounds otherwise than elsewhere.
    scale = ((largest - zero) * jnp.float32(1 / most)).astype(jnp.float16)
    # By the scale as it is stored, which rounding may have made 0 for a group of many numbers.
    inverse = 1 / jnp.where(scale > 0, scale.astype(jnp.float32), 1)
    codes = jnp.clip(jnp.round((wide - zero) * inverse), 0, most).astype(jnp.uint8)
    return codes, scale.squeeze(axis), zero.squeeze(axis).astype(jnp.float16)
