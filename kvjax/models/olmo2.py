"""OLMo-2: each sub-layer's output is normed in place of its input; q and k at full width."""

from dataclasses import replace

from kvjax.models import llama
from kvjax.models.family import Family, Tensor
from kvjax.models.qwen3 import QK_NORMS
from kvjax.nn import DecoderConfig
from kvjax.sizing import ModelSpec

POST_NORMS = (
    Tensor(
        "model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.attention_post_norm.scale"
    ),
    Tensor("model.layers.{i}.post_feedforward_layernorm.weight", "layers.{i}.mlp_post_norm.scale"),
)
TENSORS = (
    llama.EMBEDDING,
    *llama.SEPARATE_QKV,
    *llama.OUTPUT,
    *llama.GATED_MLP,
    *QK_NORMS,
    *POST_NORMS,
    llama.FINAL_NORM,
    llama.HEAD,
)


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    base = llama.decoder({"rms_norm_eps": 1e-5, **config}, spec)
    base = llama.with_attention(base, qk_norm="full")
    return replace(base, pre_norm=False, post_norm=True)


FAMILY = Family("olmo2", decoder, TENSORS)
