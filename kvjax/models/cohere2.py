"""Cohere-2 (Command R7B, Command A): a parallel residual, RoPE in the layers with a window alone.

RoPE turns neighbouring channels (2i, 2i + 1) here, which are brought into this library's order when
weights are read.
"""

from dataclasses import replace

from kvjax.models import llama
from kvjax.models.family import Family, Tensor
from kvjax.models.tensor_layout import PAIRS_IN_HEADS
from kvjax.nn import AttentionConfig, DecoderConfig, NormConfig
from kvjax.nn.sharing import AnyAttentionConfig
from kvjax.sizing import ModelSpec

_ROTATED = ("layers.{i}.attention.q.", "layers.{i}.attention.k.")
TENSORS = (
    llama.EMBEDDING,
    *(
        replace(row, layout=PAIRS_IN_HEADS) if row.path.startswith(_ROTATED) else row
        for row in llama.SEPARATE_QKV
    ),
    *llama.OUTPUT,
    *llama.GATED_MLP,
    Tensor("model.layers.{i}.input_layernorm.weight", "layers.{i}.attention_norm.scale"),
    llama.FINAL_NORM,
    llama.HEAD,
)


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    base = llama.decoder({"tie_word_embeddings": True, **config}, spec)
    return replace(
        base,
        attention=tuple(map(_without_rope_over_all, base.attention)),
        norm=NormConfig("layer", config.get("layer_norm_eps", 1e-5), bias=False),
        parallel_residual=True,
        shared_norm=True,
        logit_scale=config.get("logit_scale", 0.0625),
    )


FAMILY = Family("cohere2", decoder, TENSORS)


def _without_rope_over_all(layer: AnyAttentionConfig) -> AnyAttentionConfig:
    """Only layers with a window are rotated."""
    assert isinstance(layer, AttentionConfig)
    return layer if layer.window is not None else replace(layer, rope=None)
