"""Llama (and SmolLM2, TinyLlama, Yi, ...): RMSNorm, SwiGLU, RoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvjax.models.family import Family, Tensor
from kvjax.models.fields import FULL, SLIDING, read_activation, read_rope
from kvjax.models.tensor_layout import TRANSPOSED
from kvjax.nn import AttentionConfig, DecoderConfig, MlpConfig, NormConfig
from kvjax.sizing import ModelSpec

EMBEDDING = Tensor("model.embed_tokens.weight", "embed.embedding")
FINAL_NORM = Tensor("model.norm.weight", "norm.scale")
HEAD = Tensor("lm_head.weight", "head.kernel", TRANSPOSED)


def linear(name: str, path: str) -> tuple[Tensor, Tensor]:
    """A torch.nn.Linear: its kernel, and its bias where the decoder has one."""
    return (
        Tensor(f"{name}.weight", f"{path}.kernel", TRANSPOSED),
        Tensor(f"{name}.bias", f"{path}.bias"),
    )


SEPARATE_QKV = tuple(
    row
    for part in "qkv"
    for row in linear(f"model.layers.{{i}}.self_attn.{part}_proj", f"layers.{{i}}.attention.{part}")
)
OUTPUT = linear("model.layers.{i}.self_attn.o_proj", "layers.{i}.attention.o")
GATED_MLP = tuple(
    row
    for part in ("gate", "up", "down")
    for row in linear(f"model.layers.{{i}}.mlp.{part}_proj", f"layers.{{i}}.mlp.{part}")
)
PRE_NORMS = (
    Tensor("model.layers.{i}.input_layernorm.weight", "layers.{i}.attention_norm.scale"),
    Tensor("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.scale"),
)
TENSORS = (EMBEDDING, *SEPARATE_QKV, *OUTPUT, *GATED_MLP, *PRE_NORMS, FINAL_NORM, HEAD)


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    norm = NormConfig(eps=config.get("rms_norm_eps", 1e-6))
    bias = config.get("attention_bias", False)
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        d_model=spec.d_model,
        attention=tuple(
            AttentionConfig(
                d_model=spec.d_model,
                query_heads=layer.query_heads,
                kv_heads=layer.kv_heads,
                key_dim=layer.key_dim,
                value_dim=layer.value_dim,
                qkv_bias=bias,
                out_bias=bias,
                norm=norm,
                rope=read_rope(
                    config, layer.key_dim, kind=FULL if layer.window is None else SLIDING
                ),
                window=layer.window,
            )
            for layer in spec.layers
        ),
        mlp=MlpConfig(
            width=config["intermediate_size"],
            activation=read_activation(config, "hidden_act", "silu"),
            bias=config.get("mlp_bias", False),
        ),
        norm=norm,
        tied=config.get("tie_word_embeddings", False),
    )


def with_attention(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    """The decoder with the same change made to the attention of every layer."""
    return replace(config, attention=tuple(replace(a, **changes) for a in config.attention))


def with_mlp(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    """The decoder with other settings of the MLP that all its layers have."""
    assert isinstance(config.mlp, MlpConfig)
    return replace(config, mlp=replace(config.mlp, **changes))


FAMILY = Family("llama", decoder, TENSORS)
