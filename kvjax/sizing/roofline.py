"""The least time a decode step can take on a chip (roofline: Williams et al. 2009)."""

from collections.abc import Mapping
from dataclasses import dataclass

SOFTMAX_FLOP = 4
"""FLOP of softmax for each score, outside the matrix units.

The online softmax (Milakov and Gimelshein 2018) compares the score with the running maximum (1),
scales it and subtracts the maximum in one FMA (2) and adds the exponential to the running sum (1).
Not counted is what a kernel does once for a block of scores (rescaling) or can do without (masks,
conversions); the exponential has a ceiling of its own.
"""


@dataclass(frozen=True)
class Chip:
    """Peak rates of one chip, dense (no structured sparsity), as its maker prints them.

    Attributes:
        memory_bytes: capacity of the device memory.
        bytes_per_second: peak bandwidth of the device memory.
        bf16_flops: peak FLOP/s of bf16 matrix products.
        fp8_flops: the same for fp8 operands; None where the maker prints none.
        source: the documents the figures are from.
        vector_flops: peak FLOP/s of f32 outside the matrix units, a fused multiply-add counted as
            two; None where the maker prints none.
        exponentials_per_second: peak rate of f32 exponentials; None where it is not known.
    """

    name: str
    memory_bytes: int
    bytes_per_second: float
    bf16_flops: float
    fp8_flops: float | None
    source: str
    vector_flops: float | None = None
    exponentials_per_second: float | None = None

    @property
    def ridge(self) -> float:
        """FLOP/B above which bf16 matrix products, not memory, are the ceiling."""
        return self.bf16_flops / self.bytes_per_second

    @property
    def vector_ridge(self) -> float | None:
        """FLOP/B above which f32 products outside the matrix units are the ceiling."""
        return None if self.vector_flops is None else self.vector_flops / self.bytes_per_second


@dataclass(frozen=True)
class Work:
    """What one step asks of a chip.

    Attributes:
        memory_bytes: read from and written to the device memory.
        matrix_flop: FLOP of products on the matrix units.
        vector_flop: FLOP outside them.
        exponentials: one for each score.
    """

    memory_bytes: float
    matrix_flop: float
    vector_flop: float
    exponentials: float


@dataclass(frozen=True)
class DecodeFloor:
    """Seconds of a decode step under each ceiling; the step takes at least the longest.

    Attributes:
        ceilings: seconds by ceiling: "memory" (bytes over bandwidth), "matrix" (FLOP over the bf16
            matrix rate), "vector" (FLOP over the f32 rate outside the matrix units), "exponential"
            (exponentials over their rate). One whose rate is not known is absent.
    """

    ceilings: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The floor: the longest of the ceilings' seconds."""
        return max(self.ceilings.values())

    @property
    def binds(self) -> str:
        """The ceiling that sets the floor."""
        return max(self.ceilings, key=lambda name: self.ceilings[name])


def decode_floor(chip: Chip, work: Work) -> DecodeFloor:
    """Floor of a step whose memory traffic, products and exponentials all overlap."""
    asked = {
        "memory": (work.memory_bytes, chip.bytes_per_second),
        "matrix": (work.matrix_flop, chip.bf16_flops),
        "vector": (work.vector_flop, chip.vector_flops),
        "exponential": (work.exponentials, chip.exponentials_per_second),
    }
    return DecodeFloor(
        {name: amount / rate for name, (amount, rate) in asked.items() if rate is not None}
    )
