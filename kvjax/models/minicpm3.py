"""MiniCPM3: latent attention in a decoder whose embeddings, sub-layers and logits are scaled.

RoPE turns the two halves of its channels, as in this library.
"""

import math
from dataclasses import replace

from kvjax.models import deepseek_v2, llama
from kvjax.models.family import Family
from kvjax.nn import DecoderConfig
from kvjax.sizing import ModelSpec

TENSORS = (
    llama.EMBEDDING,
    *deepseek_v2.LATENT_ATTENTION,
    *llama.GATED_MLP,
    *llama.PRE_NORMS,
    llama.FINAL_NORM,
    llama.HEAD,
)


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    config = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, **config}
    # Null stands for what scales nothing.
    neutral = math.sqrt(len(spec.layers))
    depth, width = config.get("scale_depth", 1.4), config.get("dim_model_base", 256)
    return replace(
        deepseek_v2.latent_decoder(config, spec),
        embed_scale=config.get("scale_emb", 12),
        residual_scale=(neutral if depth is None else depth) / neutral,
        logit_scale=(spec.d_model if width is None else width) / spec.d_model,
    )


FAMILY = Family("minicpm3", decoder, TENSORS)
