"""Phi-3 and Phi-4 (text): Llama with fused [q; k; v] and fused [gate; up]."""

from kvjax.models import llama
from kvjax.models.family import Family
from kvjax.nn import DecoderConfig, LongRopeScaling
from kvjax.sizing import ModelSpec

TENSORS = (
    llama.EMBEDDING,
    *llama.linear("model.layers.{i}.self_attn.qkv_proj", "layers.{i}.attention.qkv"),
    *llama.OUTPUT,
    *llama.linear("model.layers.{i}.mlp.gate_up_proj", "layers.{i}.mlp.gate_up"),
    *llama.linear("model.layers.{i}.mlp.down_proj", "layers.{i}.mlp.down"),
    *llama.PRE_NORMS,
    llama.FINAL_NORM,
    llama.HEAD,
)


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    base = llama.with_attention(llama.decoder({"rms_norm_eps": 1e-5, **config}, spec), fused=True)
    rope = base.attention[0].rope
    if rope is not None and not isinstance(rope.scaling, LongRopeScaling | None):
        raise ValueError(f"{rope.scaling}: RoPE of phi3 knows no scaling but longrope")
    return llama.with_mlp(base, fused=True)


FAMILY = Family("phi3", decoder, TENSORS)
