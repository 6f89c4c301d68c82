"""What a conversion to latent attention did, as data and as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvjax.convert.compare import Comparison

# Nats. SmolLM2 writes readable text at less, and loops or fails at more, before any training
# (`docs/mla_conversion.md`); what training brings back is not in it.
USABLE_KL = 1.0
_YES_OR_NO = {None: "", True: "yes", False: "no"}


@dataclass(frozen=True)
class MlaReport:
    """What a conversion to latent attention did.

    Attributes:
      model_type: of the result.
      source_model_type: of the source.
      way, settings: "transmla" or "mha2mla", and its settings.
      latent_rank: L.
      rope_heads, rope_dim: rope keys of a token, and R, the channels of each.
      seed: of token ids that were drawn.
      calibration_tokens: how many tokens the moments of the layers' inputs are of.
      key_error, value_error: root mean square of what is lost of unrotated keys, and of values, on
        these tokens and relative to their own; mean over layers.
      rope_energy: share of the keys' mean square that stays rotated; mean over layers.
      bytes_per_token_before, bytes_per_token_after: bytes that a token adds to a bf16 cache.
      parameters_before, parameters_after: of the whole model; tied ones once.
      comparison: the two models' predictions; None where they were not compared.
    """

    model_type: str
    source_model_type: str
    way: str
    settings: dict[str, Any]
    latent_rank: int
    rope_heads: int
    rope_dim: int
    seed: int
    calibration_tokens: int
    key_error: float
    value_error: float
    rope_energy: float
    bytes_per_token_before: int
    bytes_per_token_after: int
    parameters_before: int
    parameters_after: int
    comparison: Comparison | None

    @property
    def usable(self) -> bool | None:
        """Whether the model can be used untrained: KL under `USABLE_KL`; None if not compared."""
        return None if self.comparison is None else self.comparison.kl < USABLE_KL

    def figures(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return {**asdict(self), "usable": self.usable}

    def rows(self) -> Iterator[tuple[str, str]]:
        """Name and value of each figure, for a table."""
        settings = "".join(f", {name} {value}" for name, value in self.settings.items())
        yield "way", f"{self.way}{settings}"
        yield "latent", f"{self.latent_rank}"
        yield "rope keys", f"{self.rope_heads} × {self.rope_dim}"
        yield (
            "cache per token, bf16",
            f"{self.bytes_per_token_before:,} B → {self.bytes_per_token_after:,} B",
        )
        yield "parameters", f"{self.parameters_before:,} → {self.parameters_after:,}"
        yield "calibrated on", f"{self.calibration_tokens:,} tokens"
        yield "keys' energy that stays rotated", f"{self.rope_energy:.1%}"
        yield "error of unrotated keys", f"{self.key_error:.2%}"
        yield "error of values", f"{self.value_error:.2%}"
        if self.comparison is not None:
            yield from self.comparison.rows()
            yield "usable untrained", _YES_OR_NO[self.usable]

    # Headings of `columns`.
    COLUMNS = ("B/token, bf16", "key error", "value error", "KL, nats", "loss, nats", "usable")

    def columns(self) -> tuple[str, ...]:
        """The rank and the figures that depend on it, for a table of several ranks."""
        compared = self.comparison
        loss = None if compared is None else compared.converted_loss
        return (
            str(self.latent_rank),
            f"{self.bytes_per_token_after:,}",
            f"{self.key_error:.2%}",
            f"{self.value_error:.2%}",
            "" if compared is None else f"{compared.kl:.4g}",
            "" if loss is None else f"{loss:.4f}",
            _YES_OR_NO[self.usable],
        )
