"""Gemma-2: windows in every other layer, norms before and after, caps on scores and logits."""

from dataclasses import replace

from kvjax.models import llama
from kvjax.models.family import Family, Tensor
from kvjax.models.fields import read_activation
from kvjax.models.gemma import every_gemma
from kvjax.models.olmo2 import POST_NORMS
from kvjax.nn import DecoderConfig
from kvjax.sizing import ModelSpec

TENSORS = (
    llama.EMBEDDING,
    *llama.SEPARATE_QKV,
    *llama.OUTPUT,
    *llama.GATED_MLP,
    Tensor("model.layers.{i}.input_layernorm.weight", "layers.{i}.attention_norm.scale"),
    Tensor("model.layers.{i}.pre_feedforward_layernorm.weight", "layers.{i}.mlp_norm.scale"),
    *POST_NORMS,
    llama.FINAL_NORM,
    llama.HEAD,
)


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    activation = read_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    base = llama.with_attention(
        every_gemma(config, spec, activation),
        scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=config.get("attn_logit_softcapping", 50.0),
    )
    return replace(base, post_norm=True, logit_cap=config.get("final_logit_softcapping", 30.0))


FAMILY = Family("gemma2", decoder, TENSORS)
