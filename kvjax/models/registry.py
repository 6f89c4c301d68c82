"""The families that are built in, by model_type."""

from __future__ import annotations

import json
from dataclasses import fields, replace

from kvjax import sizing
from kvjax.models import (
    cohere2,
    deepseek_v2,
    deepseek_v3,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    gpt_oss,
    kvjax_mla,
    llama,
    minicpm3,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from kvjax.models.family import Family
from kvjax.nn import DecoderConfig

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        llama.FAMILY,
        mistral.FAMILY,
        qwen2.FAMILY,
        qwen3.FAMILY,
        mixtral.FAMILY,
        qwen3_moe.FAMILY,
        deepseek_v2.FAMILY,
        deepseek_v3.FAMILY,
        deepseek_v3.KIMI_K2,
        minicpm3.FAMILY,
        gemma.FAMILY,
        gemma2.FAMILY,
        gemma3.FAMILY,
        gpt_oss.FAMILY,
        cohere2.FAMILY,
        phi3.FAMILY,
        olmo2.FAMILY,
        gpt2.FAMILY,
        gpt2.GROUPED,
        gpt_neox.FAMILY,
        gpt_neox.GROUPED,
    )
}


# Of each kind of layer that decoders have, the fields of its spec that they build on.
_KEPT = {
    "attention": ("query_heads", "kv_heads", "key_dim", "value_dim", "window"),
    "latent": ("kind", "latent_rank", "rope_dim", "query_rank"),
}


def read_decoder(config: dict) -> tuple[Family, DecoderConfig]:
    """The family of a config.json and the decoder it describes.

    Raises:
      ValueError: naming the field, for a model_type or a setting that is not supported.
    """
    if config.get("model_type") == kvjax_mla.MODEL_TYPE:
        family = kvjax_mla.of(_family(config, "source_model_type"))
        spec = sizing.load(config)
    else:
        family, spec = _family(config, "model_type"), sizing.load(config)
        _check_layers(spec)
    try:
        return family, replace(family.decoder(config, spec), source=json.dumps(config))
    except KeyError as error:
        raise ValueError(
            f"config.json of model_type {config['model_type']} lacks {error}"
        ) from None


def _family(config: dict, field: str) -> Family:
    """Of the model_type that a field names."""
    if config.get(field) not in FAMILIES:
        accepted = ", ".join(sorted(FAMILIES))
        raise ValueError(f"{field}={config.get(field)!r}: accepted are {accepted}")
    return FAMILIES[config[field]]


def _check_layers(spec: sizing.ModelSpec) -> None:
    """Decoders are built of layers that attend to what their own sequence left, and keep this."""
    for index, layer in enumerate(spec.layers):
        kept = _KEPT.get(layer.kind, ())
        plain = sizing.LayerSpec(
            **{name: getattr(layer, name) for name in (*_KEPT["attention"], *kept)}
        )
        for field in fields(plain):
            given, accepted = getattr(layer, field.name), getattr(plain, field.name)
            if given != accepted:
                raise ValueError(
                    f"layer {index} of {spec.model_type}: {field.name} is {given!r}, which sizing "
                    f"counts and decoders do not have; accepted: {accepted!r}"
                )
