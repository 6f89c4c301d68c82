"""Byte arithmetic of the codecs: how many bytes encoded records take.

A codec sees the rows of one sequence in one layer, not single numbers, so that one with scales or
with a residual window answers the same call.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class CodecSpec:
    """A codec that stores each number of K and V in `itemsize` bytes and nothing beside it."""

    name: str
    itemsize: int

    def nbytes(self, rows: int, kv_heads: int, key_dim: int, value_dim: int) -> int:
        """Bytes of `rows` records: K (kv_heads, rows, key_dim), V (kv_heads, rows, value_dim)."""
        return rows * kv_heads * (key_dim + value_dim) * self.itemsize


CODECS = {
    spec.name: spec
    for spec in (
        CodecSpec("f32", 4),
        CodecSpec("bf16", 2),
        CodecSpec("f16", 2),
        CodecSpec("fp8_e4m3", 1),
        CodecSpec("fp8_e5m2", 1),
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
    spec = CODECS.get(_SPELLINGS.get(name, name))
    if spec is None:
        raise ValueError(f"codec: got {name!r}; accepted: {', '.join([*CODECS, *_SPELLINGS])}")
    return spec
