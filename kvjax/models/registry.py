"""The families that are built in, by model_type."""

from __future__ import annotations

from kvjax import sizing
from kvjax.models import gemma, gpt2, gpt_neox, llama, mistral, olmo2, phi3, qwen2, qwen3
from kvjax.models.family import Family
from kvjax.nn import DecoderConfig

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        llama.FAMILY,
        mistral.FAMILY,
        qwen2.FAMILY,
        qwen3.FAMILY,
        gemma.FAMILY,
        phi3.FAMILY,
        olmo2.FAMILY,
        gpt2.FAMILY,
        gpt2.GROUPED,
        gpt_neox.FAMILY,
        gpt_neox.GROUPED,
    )
}


def read_decoder(config: dict) -> tuple[Family, DecoderConfig]:
    """The family of a config.json and the decoder it describes.

    Raises:
      ValueError: naming the field, for a model_type or a setting that is not supported.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type={model_type!r}: accepted are {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[model_type]
    try:
        return family, family.decoder(config, sizing.load(config))
    except KeyError as error:
        raise ValueError(f"config.json of model_type {model_type} lacks {error}") from None
