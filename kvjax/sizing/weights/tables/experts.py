"""Families with routed experts and nothing else behind attention."""

from __future__ import annotations

from dataclasses import replace

from kvjax.sizing.config import Fields, Flag
from kvjax.sizing.weights.figures import Experts, Weights
from kvjax.sizing.weights.moe import (
    EXPERTS,
    MIXTRAL_MOE,
    QWEN_MOE,
    ROUTED_EXPERTS,
    Moe,
    behind,
)
from kvjax.sizing.weights.parts import (
    ATTENTION_BIAS,
    Site,
    biases,
    head_norms,
    output_gate,
    sinks,
    small,
    when,
    width_norms,
)
from kvjax.sizing.weights.rules import TIED, WeightRules

_BIASED = biases(ATTENTION_BIAS, ATTENTION_BIAS)


def _dbrx_experts(site: Site) -> Weights:
    """DBRX keeps the sizes of its experts in `ffn_config`."""
    own = Fields(site.fields.part("ffn_config") or {}, "dbrx's ffn_config")
    count, per_token = own.number("moe_num_experts", 4), own.number("moe_top_k", 1)
    each = 3 * site.d_model * own.number("ffn_hidden_size", 3584)
    return Weights(small=count * site.d_model, experts=(Experts(count, per_token, each),))


def _shared_mlp(site: Site) -> Weights:
    """Granite's feed-forward layer beside the experts."""
    return Weights(shared=3 * site.d_model * site.number("shared_intermediate_size"))


_QWEN3_MOE = WeightRules(
    ffn=(QWEN_MOE,),
    attention=(_BIASED, head_norms),
    defaults={
        "vocab_size": 151936,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
)
_MIXTRAL = WeightRules(ffn=(MIXTRAL_MOE,))
_GRANITE_MOE = replace(_MIXTRAL, attention=(_BIASED,))
_GRANITE_SHARED = replace(_GRANITE_MOE, ffn=(MIXTRAL_MOE, _shared_mlp))

RULES = {
    "beam": WeightRules(
        ffn=(Moe(EXPERTS, "moe_intermediate_size", where=behind(3)),),
        attention=(_BIASED, head_norms, output_gate(), sinks),
        norms=4,
    ),
    "dbrx": WeightRules(ffn=(_dbrx_experts,)),
    "flex_olmo": WeightRules(
        ffn=(replace(MIXTRAL_MOE, experts=EXPERTS),), attention=(_BIASED, width_norms)
    ),
    "gpt_oss": WeightRules(
        ffn=(replace(MIXTRAL_MOE, bias=True),),
        attention=(biases(Flag("attention_bias", True), Flag("attention_bias", True)), sinks),
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoe_swa": replace(_GRANITE_SHARED, attention=(_BIASED, sinks)),
    "granitemoeshared": _GRANITE_SHARED,
    "mellum": replace(
        _QWEN3_MOE, ffn=(replace(QWEN_MOE, where=behind(0)),), attention=(_BIASED, head_norms)
    ),
    "mimo_v2_flash": WeightRules(
        ffn=(Moe(ROUTED_EXPERTS, "moe_intermediate_size", where=behind(1)),),
        attention=(
            biases(ATTENTION_BIAS),
            lambda site: sinks(site) if site.layer.span is not None else Weights(),
        ),
    ),
    "minimax_m2": replace(_MIXTRAL, attention=(width_norms,)),
    "mixtral": _MIXTRAL,
    "olmoe": WeightRules(
        ffn=(replace(MIXTRAL_MOE, experts=EXPERTS),), attention=(_BIASED, width_norms)
    ),
    "phimoe": replace(
        _GRANITE_MOE,
        norm_bias=True,
        model=(when(Flag("lm_head_bias", False), small("vocab_size")),),
    ),
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_omni_moe_text": replace(
        _QWEN3_MOE, defaults={**_QWEN3_MOE.defaults, "vocab_size": 3584, "intermediate_size": 18944}
    ),
    "qwen3_vl_moe_text": replace(
        _QWEN3_MOE,
        tied=TIED,
        defaults={
            "vocab_size": 151936,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
    ),
}
