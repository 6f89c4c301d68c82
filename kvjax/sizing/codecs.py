"""Byte arithmetic of the codecs: how many bytes encoded records take.

A record is made of `Part`s, arrays of heads × width numbers a token; a codec answers for one part.
Three figures, since one with a residual window differs in them: what live rows take, what is
allocated for a number of slots, and what a decode step reads.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

_SCALE = 4  # bytes of an f32 scale, as decode attention takes them


class Part(NamedTuple):
    """One array of a record.

    Attributes:
        heads: of one shard.
        width: numbers a head.
        key: whether it holds keys (K, rope keys, index keys), else values or a latent.
        rope: whether it is the rope key beside a latent, which tiled codecs keep wider.
    """

    heads: int
    width: int
    key: bool
    rope: bool = False


@dataclass(frozen=True)
class CodecSpec:
    """A codec that stores each number in `bits` bits and nothing beside it.

    Attributes:
        name: as in `CODECS`.
        bits: of one stored number, without scales.
    """

    name: str
    bits: int

    @property
    def itemsize(self) -> int:
        """Bytes of one number, where it is a whole number of bytes."""
        if self.bits % 8:
            raise ValueError(f"codec: got {self.name!r} of {self.bits} bits; accepted: whole bytes")
        return self.bits // 8

    @property
    def activation_itemsize(self) -> int:
        """Bytes of what is not encoded (states): 4 beside an f32 cache, otherwise 2."""
        return 4 if self.bits == 32 else 2

    @property
    def tokens_sharing(self) -> int:
        """Tokens that share a scale; a layout may replace them only together."""
        return 1

    @property
    def tokens_kept_exact(self) -> int:
        """Newest tokens that are not encoded yet."""
        return 0

    def per_token(self, part: Part) -> Fraction:
        """Bytes of one more token in the long run."""
        return Fraction(part.heads * -(-part.width * self.bits // 8))

    def live(self, rows: int, part: Part) -> int:
        """Bytes of `rows` live rows and nothing else."""
        return rows * int(self.per_token(part))

    def allocated(self, slots: int, part: Part) -> int:
        """Bytes of the arrays for `slots` slots."""
        return self.live(slots, part)

    def read(self, rows: int, part: Part) -> int:
        """Bytes that a decode step reads of `rows` live rows."""
        return self.live(rows, part)

    def constants(self, part: Part) -> int:
        """Bytes of scales that one layer keeps whatever its batch and length."""
        return 0


@dataclass(frozen=True)
class Scaled(CodecSpec):
    """Codes with one f32 scale for a tensor, for a head, or for a head and token.

    The scales of decode attention: (), (K,) and (B, K, S).
    """

    scale: str = "token"

    def per_token(self, part: Part) -> Fraction:
        return super().per_token(part) + (part.heads * _SCALE if self.scale == "token" else 0)

    def constants(self, part: Part) -> int:
        return {"tensor": _SCALE, "head": part.heads * _SCALE, "token": 0}[self.scale]


@dataclass(frozen=True)
class Tiled(CodecSpec):
    """Codes with one scale for each tile of channels of a head and token.

    As in FlashMLA (656 bytes a record of 512 + 64) and in NVFP4 (352), which keep the rope key
    beside a latent wider.

    Attributes:
        tile: channels a scale; the last tile of a head may be short.
        scale_bytes: of one scale.
        rope_bits: of a number of the rope key beside a latent, which then has no scales; None to
            encode it as the rest.
    """

    tile: int = 32
    scale_bytes: int = 2
    rope_bits: int | None = None

    def per_token(self, part: Part) -> Fraction:
        if part.rope and self.rope_bits is not None:
            return Fraction(part.heads * -(-part.width * self.rope_bits // 8))
        scales = -(-part.width // self.tile) * self.scale_bytes
        return super().per_token(part) + part.heads * scales


@dataclass(frozen=True)
class Kivi(CodecSpec):
    """KIVI (Liu et al. 2024): keys in groups of tokens per channel, values of channels per token.

    The newest tokens stay in 16 bits: of the keys those that do not fill a block of `residual`, of
    the values the last `residual`. Each group keeps an fp16 scale and zero point.
    """

    group: int = 32
    residual: int = 128

    @property
    def tokens_sharing(self) -> int:
        return self.group

    @property
    def tokens_kept_exact(self) -> int:
        return self.residual

    def per_token(self, part: Part) -> Fraction:
        return Fraction(part.heads * part.width) * (self.bits + Fraction(32, self.group)) / 8

    def live(self, rows: int, part: Part) -> int:
        exact = rows % self.residual if part.key else min(rows, self.residual)
        return self._mixed(rows - exact, exact, part)

    def allocated(self, slots: int, part: Part) -> int:
        """Codes for all but `residual` slots, and `residual` 16-bit slots always."""
        return self._mixed(max(slots - self.residual, 0), self.residual, part) if slots else 0

    def read(self, rows: int, part: Part) -> int:
        """As with a full residual window, of keys too: their own share falls with each block."""
        exact = min(rows, self.residual)
        return self._mixed(rows - exact, exact, part)

    def _mixed(self, encoded: int, exact: int, part: Part) -> int:
        codes = encoded * self.per_token(part)
        return -(-codes.numerator // codes.denominator) + exact * part.heads * part.width * 2


CODECS: dict[str, CodecSpec] = {
    spec.name: spec
    for spec in (
        CodecSpec("f32", 32),
        CodecSpec("bf16", 16),
        CodecSpec("f16", 16),
        Scaled("fp8_e4m3", 8, "tensor"),
        Scaled("fp8_e5m2", 8, "tensor"),
        Scaled("fp8_e4m3_head", 8, "head"),
        Scaled("fp8_e4m3_token", 8, "token"),
        Scaled("int8", 8, "token"),
        Tiled("int4", 4),
        Kivi("kivi2", 2),
        Kivi("kivi4", 4),
        Tiled("fp8_ds_mla", 8, tile=128, scale_bytes=4, rope_bits=16),
        Tiled("nvfp4", 4, tile=16, scale_bytes=1, rope_bits=8),
    )
}
_SPELLINGS = {"fp32": "f32", "fp16": "f16", "fp8": "fp8_e4m3"}


def codec(name: str | CodecSpec) -> CodecSpec:
    """The codec of that name; fp32, fp16 and fp8 are accepted for f32, f16 and fp8_e4m3.

    Raises:
        ValueError: no codec has that name.
    """
    if isinstance(name, CodecSpec):
        return name
    spec = CODECS.get(_SPELLINGS.get(name, name)) if isinstance(name, str) else None
    if spec is None:
        raise ValueError(f"codec: got {name!r}; accepted: {', '.join([*CODECS, *_SPELLINGS])}")
    return spec
