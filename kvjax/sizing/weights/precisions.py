"""How weights are stored: bits a parameter with its share of scales, and which are stored so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from kvjax.sizing.weights.figures import Weights

# What stays in 16 bits in quantised checkpoints, beside what a precision does not cover.
_KEPT_BITS = 16


@dataclass(frozen=True)
class Precision:
    """How the weights of a model are stored.

    Attributes:
        name: how it is asked for.
        bits: of a parameter that is covered, with its share of scales and zero points.
        covers: "all" parameters; the matrices of the "layers", so that the head, tables, norms,
            biases and routers stay in 16 bits; or routed "experts" alone, and the layers of a model
            that has none.
        source: where the format is described.
    """

    name: str
    bits: Fraction
    covers: str
    source: str

    @property
    def itemsize(self) -> float:
        """Bytes of a covered parameter."""
        return float(self.bits / 8)

    def nbytes(
        self, weights: Weights, projections: int, experts: float, lookup: int, encoder: int
    ) -> int:
        """Bytes of weights, rounded up.

        Args:
            weights: the model's, for what is read whatever the batch.
            projections: parameters of attention's projections.
            experts: parameters of the routed experts that count.
            lookup: parameters of the tables that count.
            encoder: parameters of an encoder that count.
        """
        layers = projections + weights.ffn + weights.shared + weights.mixers + encoder
        kept = weights.head + weights.small + lookup
        if self.covers == "all":
            layers, kept = layers + kept, 0
        elif self.covers == "experts" and weights.experts:
            layers, kept = 0, layers + kept
        bits = (layers + Fraction(experts)) * self.bits + kept * _KEPT_BITS
        return math.ceil(bits / 8)


def _bits(codes: int, scale_bits: int = 0, group: int = 1) -> Fraction:
    """Bits of a parameter whose group of parameters shares `scale_bits`."""
    return codes + Fraction(scale_bits, group)


WEIGHT_PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("f32", _bits(32), "all", "IEEE 754 binary32"),
        Precision("bf16", _bits(16), "all", "bfloat16"),
        Precision("f16", _bits(16), "all", "IEEE 754 binary16"),
        Precision(
            "fp8",
            _bits(8, 32, 128 * 128),
            "layers",
            "DeepSeek-V3 (DeepSeek-AI 2024), section 3.3: e4m3, an f32 scale for 128 × 128",
        ),
        Precision(
            "int8",
            _bits(8),
            "layers",
            "LLM.int8() (Dettmers et al. 2022): a scale for each output, too few to count",
        ),
        Precision(
            "int4",
            _bits(4, 16 + 4, 128),
            "layers",
            "AWQ (Lin et al. 2024): an f16 scale and a 4-bit zero point for 128 parameters",
        ),
        Precision(
            "mxfp4",
            _bits(4, 8, 32),
            "experts",
            "OCP Microscaling Formats 1.0 (2023): e2m1, an e8m0 scale for 32; GPT-OSS's experts",
        ),
        Precision(
            "nvfp4",
            _bits(4, 8, 16),
            "layers",
            "NVIDIA (2025), Introducing NVFP4: e2m1, an e4m3 scale for 16",
        ),
    )
}
_SPELLINGS = {"fp32": "f32", "fp16": "f16", "fp8_e4m3": "fp8"}


def precision(name: str | Precision) -> Precision:
    """The precision of that name; fp32, fp16 and fp8_e4m3 are accepted for f32, f16 and fp8.

    Raises:
        ValueError: no precision has that name.
    """
    if isinstance(name, Precision):
        return name
    known = isinstance(name, str)
    found = WEIGHT_PRECISIONS.get(_SPELLINGS.get(name, name)) if known else None
    if found is None:
        raise ValueError(
            f"weights: got {name!r}; accepted: {', '.join([*WEIGHT_PRECISIONS, *_SPELLINGS])}"
        )
    return found
