"""The least time a decode step can take on a chip (roofline: Williams et al. 2009)."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Peak rates of one chip, dense (no structured sparsity), as its maker prints them.

    Attributes:
        memory_bytes: capacity of the device memory.
        bytes_per_second: peak bandwidth of the device memory.
        bf16_flops: peak FLOP/s of bf16 matrix products.
        fp8_flops: the same for fp8 operands; None where the maker prints none.
        source: the document the figures are from.
    """

    name: str
    memory_bytes: int
    bytes_per_second: float
    bf16_flops: float
    fp8_flops: float | None
    source: str

    @property
    def ridge(self) -> float:
        """FLOP/B above which bf16 matrix products, not memory, are the ceiling."""
        return self.bf16_flops / self.bytes_per_second


@dataclass(frozen=True)
class DecodeFloor:
    """Seconds of a decode step under each ceiling; the step takes at least the longest.

    Attributes:
        ceilings: seconds by ceiling: "memory" (bytes read over bandwidth), "matrix" (FLOP over the
            bf16 matrix rate).
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


def decode_floor(chip: Chip, nbytes: float, flop: float) -> DecodeFloor:
    """Floor of a step that reads `nbytes` bytes and does `flop` FLOP in bf16 matrix products."""
    return DecodeFloor({"memory": nbytes / chip.bytes_per_second, "matrix": flop / chip.bf16_flops})
