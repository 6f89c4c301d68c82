"""Gemma: GeGLU, norms stored as the distance from one, embeddings scaled by sqrt(D), tied."""

import math
from dataclasses import replace

from kvjax.models import llama
from kvjax.models.family import Family
from kvjax.models.fields import choose, read_activation
from kvjax.nn import DecoderConfig
from kvjax.sizing import ModelSpec


def every_gemma(config: dict, spec: ModelSpec, activation: str) -> DecoderConfig:
    """What all generations of Gemma have in common."""
    field = "use_bidirectional_attention"  # of PaliGemma's prompts
    choose(field, bool(config.get(field)), {False: None})
    base = llama.decoder({"tie_word_embeddings": True, **config}, spec)
    base = llama.with_mlp(base, activation=activation)
    norm = replace(base.norm, unit_offset=True)
    base = llama.with_attention(base, norm=norm)
    return replace(base, norm=norm, embed_scale=math.sqrt(spec.d_model))


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    activation = read_activation(config, "hidden_act", "gelu_pytorch_tanh")
    if activation == "gelu":  # the first configs' word for the tanh form they were trained with
        activation = "gelu_tanh"
    return every_gemma(config, spec, activation)


FAMILY = Family("gemma", decoder, llama.TENSORS)
