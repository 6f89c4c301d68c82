"""What a conversion did, as data and as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvjax.convert.compare import Comparison

CODEC = "bf16"  # of the cache whose bytes are reported


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
      model_type: of the result.
      kv_heads_before, kv_heads_after: K.
      method, seed: how heads were pooled; "repeat" where they were written out instead.
      bytes_per_token_before, bytes_per_token_after: bytes that a token adds to a bf16 cache.
      parameters_before, parameters_after: of the whole model; tied ones once.
      approximations: what pooling approximates beside the heads themselves, as sentences.
      comparison: the two models' predictions; None where they were not compared.
    """

    model_type: str
    kv_heads_before: int
    kv_heads_after: int
    method: str
    seed: int
    bytes_per_token_before: int
    bytes_per_token_after: int
    parameters_before: int
    parameters_after: int
    approximations: tuple[str, ...]
    comparison: Comparison | None

    @property
    def parameters_saved(self) -> int:
        return self.parameters_before - self.parameters_after

    def figures(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return {**asdict(self), "parameters_saved": self.parameters_saved}

    def rows(self) -> Iterator[tuple[str, str]]:
        """Name and value of each figure, for a table."""
        yield "KV heads", f"{self.kv_heads_before} → {self.kv_heads_after} ({self.method})"
        yield (
            "cache per token, bf16",
            f"{self.bytes_per_token_before:,} B → {self.bytes_per_token_after:,} B",
        )
        yield "parameters", f"{self.parameters_before:,} → {self.parameters_after:,}"
        yield "saved", f"{self.parameters_saved:,}"
        if self.comparison is not None:
            yield from self.comparison.rows()
