"""Families with latent attention (MLA)."""

from __future__ import annotations

from dataclasses import replace

from kvjax.sizing.config import Flag
from kvjax.sizing.weights.figures import Experts, Weights
from kvjax.sizing.weights.moe import (
    DEEPSEEK_MOE,
    ROUTED_EXPERTS,
    from_layer,
    mlp_types,
    times,
    with_frequency,
)
from kvjax.sizing.weights.parts import (
    ATTENTION_BIAS,
    MLP_BIAS,
    Part,
    Site,
    dense,
    if_number,
    output_gate,
    sinks,
)
from kvjax.sizing.weights.rules import TIED, WeightRules


def latent_norms(site: Site) -> Weights:
    """Norms of the latent and of the query's bottleneck, and the biases of the way down and out."""
    layer = site.layer
    if layer.kind != "latent":
        return Weights()
    bias = site.fields.flag(ATTENTION_BIAS)
    rank = layer.query_rank or 0
    biases = rank + layer.latent_rank + layer.rope_dim + site.d_model
    return Weights(small=layer.latent_rank + rank + bias * biases)


def indexer(absent: int = 64) -> Part:
    """What picks the tokens to attend to (DeepSeek-V3.2): queries, a key with a norm, weights.

    Args:
        absent: index heads where the config lacks them.
    """

    def part(site: Site) -> Weights:
        layer = site.layer
        if not layer.index_dim:
            return Weights()
        heads = site.number("index_n_heads", absent)
        queries = (layer.query_rank or site.d_model) * heads * layer.index_dim
        key = site.d_model * layer.index_dim
        return Weights(mixers=queries + key + site.d_model * heads, small=2 * layer.index_dim)

    return part


_DEEPSEEK_V3 = WeightRules(ffn=(DEEPSEEK_MOE,), attention=(latent_norms,))
_DEEPSEEK_V32 = WeightRules(
    ffn=(replace(DEEPSEEK_MOE, where=mlp_types(from_layer(absent=3))),),
    attention=(latent_norms, indexer()),
)
_MLA_DENSE = WeightRules(ffn=(dense(bias=MLP_BIAS),), attention=(latent_norms,), tied=TIED)


_AXK1_LAYERS = mlp_types(with_frequency(1))


def _axk1_norm(site: Site) -> Weights:
    """A norm behind the experts."""
    return Weights(small=site.d_model * _AXK1_LAYERS(site))


def _behind_first(site: Site) -> bool:
    return site.index >= 1


def _longcat_experts(site: Site) -> Weights:
    """Experts beside choices that give a token back as it is (LongCat-Flash)."""
    count, choices = site.size(ROUTED_EXPERTS), site.number("zero_expert_num", 256)
    each = 3 * site.d_model * site.size("expert_ffn_hidden_size")
    per_token, choices = site.size("moe_topk"), choices + count
    bias = choices * site.fields.flag(Flag("router_bias", False))
    return Weights(
        small=choices * site.d_model + bias,
        experts=(Experts(count, per_token, each, choices=choices),),
    )


def _streams(site: Site) -> Weights:
    """Weights that mix HY-V4's streams before and after attention and feed-forward layer."""
    streams = site.number("hc_mult", 4)
    return Weights(mixers=2 * 2 * streams**2 * site.d_model, small=2 * (2 * streams + 2))


def last_mixing(site: Site) -> Weights:
    """Weights that mix the streams into one before the head."""
    streams = site.number("hc_mult", 4)
    return Weights(mixers=streams**2 * site.d_model, small=streams + 1)


_HY_V4 = WeightRules(
    ffn=(replace(DEEPSEEK_MOE, where=mlp_types(_behind_first)), _streams),
    attention=(latent_norms, indexer(16), output_gate(), sinks),
    model=(last_mixing,),
    defaults={
        "vocab_size": 120832,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
    },
)

RULES = {
    "axk1": WeightRules(
        ffn=(replace(DEEPSEEK_MOE, where=_AXK1_LAYERS), _axk1_norm), attention=(latent_norms,)
    ),
    "deepseek_v2": replace(
        _DEEPSEEK_V3,
        ffn=(
            replace(
                DEEPSEEK_MOE,
                shared=times(if_number("n_shared_experts", 2), "moe_intermediate_size"),
                shared_bias=MLP_BIAS,
                where=from_layer(),
                otherwise=dense(bias=MLP_BIAS),
            ),
        ),
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V32,
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3, ffn=(replace(DEEPSEEK_MOE, where=mlp_types(_behind_first)),)
    ),
    "glm_moe_dsa": replace(_DEEPSEEK_V32, attention=(latent_norms, indexer(32))),
    "hy_v4": _HY_V4,
    "hy_v4_vl_text": replace(_HY_V4, attention=(latent_norms, indexer(32), output_gate(), sinks)),
    "kimi_k2": _DEEPSEEK_V3,
    "longcat_flash": WeightRules(
        ffn=(_longcat_experts, dense("ffn_hidden_size"), dense("ffn_hidden_size")),
        attention=(latent_norms,),
        norms=4,
        entries=2,
    ),
    "minicpm3": _MLA_DENSE,
    "mistral4": replace(_DEEPSEEK_V3, ffn=(replace(DEEPSEEK_MOE, where=from_layer()),)),
    "sarvam_mla": replace(_DEEPSEEK_V3, ffn=(replace(DEEPSEEK_MOE, where=from_layer(absent=1)),)),
    "youtu": _MLA_DENSE,
}
