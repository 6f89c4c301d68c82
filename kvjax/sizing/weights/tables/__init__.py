"""The parameters of each family, one table for each kind of family."""

from kvjax.sizing.weights.rules import WeightRules
from kvjax.sizing.weights.tables import (
    bert,
    compressed,
    dense,
    encoder_decoder,
    experts,
    gemma,
    gpt,
    hybrid,
    latent,
    recurrent,
    remote,
    shared_experts,
)

RULES: dict[str, WeightRules] = {
    **dense.RULES,
    **gpt.RULES,
    **experts.RULES,
    **shared_experts.RULES,
    **latent.RULES,
    **hybrid.RULES,
    **gemma.RULES,
    **compressed.RULES,
    **remote.RULES,
    **bert.RULES,
    **encoder_decoder.RULES,
    **recurrent.RULES,
}

__all__ = ["RULES"]
