"""DeepSeek-V2: multi-head latent attention, and a mixture of experts of which some are shared.

RoPE turns neighbouring channels (2i, 2i + 1) here, which are brought into this library's order when
weights are read. What leads up from the latent to keys and to values is one tensor.
"""

from __future__ import annotations

from dataclasses import replace

from kvjax.models import llama
from kvjax.models.family import Family, Tensor
from kvjax.models.fields import choose, read_activation, read_rope, read_yarn_temperature
from kvjax.models.mixtral import FUSED_EXPERTS, ROUTER
from kvjax.models.qwen3_moe import EXPERTS
from kvjax.models.tensor_layout import (
    KEYS_UP,
    PAIRS_AFTER_LATENT,
    PAIRS_IN_QUERIES,
    VALUES_UP,
)
from kvjax.nn import (
    DecoderConfig,
    Gated,
    Groups,
    LatentAttentionConfig,
    MlpConfig,
    MoeConfig,
    NormConfig,
    Router,
)
from kvjax.sizing import LayerSpec, ModelSpec

_STORED, _ATTENTION = "model.layers.{i}.self_attn", "layers.{i}.attention"


def _linear(name: str, path: str) -> tuple[Tensor, Tensor]:
    return llama.linear(f"{_STORED}.{name}", f"{_ATTENTION}.{path}")


LATENT_ATTENTION = (
    *_linear("q_proj", "q"),
    *_linear("q_a_proj", "q_down"),
    Tensor(f"{_STORED}.q_a_layernorm.weight", f"{_ATTENTION}.q_norm.scale"),
    *_linear("q_b_proj", "q_up"),
    *_linear("kv_a_proj_with_mqa", "kv_down"),
    Tensor(f"{_STORED}.kv_a_layernorm.weight", f"{_ATTENTION}.kv_norm.scale"),
    Tensor(f"{_STORED}.kv_b_proj.weight", f"{_ATTENTION}.k_up", KEYS_UP),
    Tensor(f"{_STORED}.kv_b_proj.weight", f"{_ATTENTION}.v_up", VALUES_UP),
    *llama.OUTPUT,
)
_PAIRS = {
    f"{_ATTENTION}.{path}": layout
    for projection, layout in (
        ("q", PAIRS_IN_QUERIES),
        ("q_up", PAIRS_IN_QUERIES),
        ("kv_down", PAIRS_AFTER_LATENT),
    )
    for path in (f"{projection}.kernel", f"{projection}.bias")
}
SHARED_EXPERTS = tuple(
    row
    for part in ("gate", "up", "down")
    for row in llama.linear(
        f"model.layers.{{i}}.mlp.shared_experts.{part}_proj", f"layers.{{i}}.mlp.shared.{part}"
    )
)
TENSORS = (
    llama.EMBEDDING,
    *(replace(row, layout=_PAIRS.get(row.path, row.layout)) for row in LATENT_ATTENTION),
    *llama.GATED_MLP,
    ROUTER,
    *EXPERTS,
    *SHARED_EXPERTS,
    *llama.PRE_NORMS,
    llama.FINAL_NORM,
    llama.HEAD,
)


def latent_attention(config: dict, layer: LayerSpec) -> LatentAttentionConfig:
    """A layer of latent attention, by the fields that all its families have in common."""
    bias = config.get("attention_bias", False)
    return LatentAttentionConfig(
        d_model=config["hidden_size"],
        query_heads=layer.query_heads,
        latent_rank=layer.latent_rank,
        rope_dim=layer.rope_dim,
        head_dim=layer.key_dim - layer.rope_dim,
        head_value_dim=layer.value_dim,
        rope=read_rope(config, layer.rope_dim),
        query_rank=layer.query_rank,
        # Queries that are made by way of nothing have none in any case.
        query_bias=bias and layer.query_rank is not None,
        latent_bias=bias,
        out_bias=bias,
        norm=NormConfig(eps=1e-6),  # of the classes; the config's own is for the other norms
        scale=layer.key_dim**-0.5 * read_yarn_temperature(config) ** 2,
    )


def with_experts(base: DecoderConfig, config: dict, router: Router) -> DecoderConfig:
    """The decoder with experts in all layers but the first."""
    assert isinstance(base.mlp, MlpConfig)
    choose("moe_layer_freq", config.get("moe_layer_freq", 1), {1: None})
    width, shared = config["moe_intermediate_size"], config.get("n_shared_experts")
    sparse = MoeConfig(
        width=width,
        experts=config["n_routed_experts"],
        chosen=config["num_experts_per_tok"],
        router=router,
        gate=Gated(base.mlp.activation),
        shared=replace(base.mlp, width=width * shared) if shared else None,
    )
    dense = config.get("first_k_dense_replace", 0)
    mlp = tuple(base.mlp if i < dense else sparse for i in range(len(base.attention)))
    return replace(base, mlp=mlp)


def latent_decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    """Llama's decoder with latent attention."""
    norm = NormConfig(eps=config.get("rms_norm_eps", 1e-6))
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        d_model=spec.d_model,
        attention=tuple(latent_attention(config, layer) for layer in spec.layers),
        mlp=MlpConfig(
            width=config["intermediate_size"],
            activation=read_activation(config, "hidden_act", "silu"),
            bias=config.get("mlp_bias", False),
        ),
        norm=norm,
        tied=config.get("tie_word_embeddings", False),
    )


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    choose("use_mla", config.get("use_mla", True), {True: None})
    choose("scoring_func", config.get("scoring_func", "softmax"), {"softmax": None})
    # DeepSeek's code and transformers' differ in what it does.
    choose("norm_topk_prob", bool(config.get("norm_topk_prob", False)), {False: None})
    method = config.get("topk_method", "greedy")
    choose("topk_method", method, {"greedy": None, "group_limited_greedy": None})
    groups = None
    if method == "group_limited_greedy":
        groups = Groups(config["n_group"], config["topk_group"])
    router = Router(normed=False, scale=config.get("routed_scaling_factor", 1.0), groups=groups)
    return with_experts(latent_decoder(config, spec), config, router)


FAMILY = Family("deepseek_v2", decoder, TENSORS, other_forms=FUSED_EXPERTS)
