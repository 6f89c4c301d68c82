"""Families with routed experts after attention with K and V of its own."""

from __future__ import annotations

from dataclasses import replace

from kvjax.sizing.config import Count, Fields, Flag
from kvjax.sizing.weights.figures import Experts, Weights
from kvjax.sizing.weights.moe import (
    DEEPSEEK_MOE,
    EXPERTS,
    MIXTRAL_MOE,
    QWEN_MOE,
    ROUTED_EXPERTS,
    SHARED_EXPERT,
    Moe,
    Where,
    from_layer,
    mlp_types,
    times,
)
from kvjax.sizing.weights.parts import (
    ATTENTION_BIAS,
    MLP_BIAS,
    Site,
    biases,
    dense,
    head_gate,
    head_norms,
    if_number,
    or_zero,
    output_gate,
    sinks,
    small,
    when,
    width_norms,
)
from kvjax.sizing.weights.rules import TIED, WeightRules

_BIASED = biases(ATTENTION_BIAS, ATTENTION_BIAS)
_SHARED = times(if_number("num_shared_experts", 1), "moe_intermediate_size")
_USE_BIAS = Flag("use_bias", False)


def _behind(count: int) -> Where:
    """Layers behind the first `count`, where `mlp_layer_types` does not say which."""
    return mlp_types(lambda site: site.index >= count)


def _ernie_layers(site: Site) -> bool:
    """Each so many-th layer, from one index to another."""
    start, step = site.number("moe_layer_start_index", 1), site.number("moe_layer_interval", 1)
    end = site.fields.get("moe_layer_end_index")
    last = site.depth - 1 if end in (-1, None) else end
    return (site.index + 1) % step == 0 and start <= site.index <= last


def _llama4_layers(site: Site) -> bool:
    """Layers that `moe_layers` lists, or each so many-th."""
    listed = site.fields.get("moe_layers")
    if listed is not None:
        return site.index in listed
    return (site.index + 1) % site.number("interleave_moe_layer_step", 1) == 0


def _dbrx_experts(site: Site) -> Weights:
    """DBRX keeps the sizes of its experts in `ffn_config`."""
    own = Fields(site.fields.part("ffn_config") or {}, "dbrx's ffn_config")
    count, per_token = own.number("moe_num_experts", 4), own.number("moe_top_k", 1)
    each = 3 * site.d_model * own.number("ffn_hidden_size", 3584)
    return Weights(small=count * site.d_model, experts=(Experts(count, per_token, each),))


def _minimax_layers(site: Site) -> bool:
    """Layers that `moe_layer_freq` marks."""
    marks = site.fields.get("moe_layer_freq")
    return marks is None or bool(marks[site.index])


def _minimax_index(site: Site) -> Weights:
    """MiniMax-M3's index: queries and a key, both with a norm."""
    width = site.layer.index_dim
    if not width:
        return Weights()
    legacy = site.fields.part("sparse_attention_config") or {}
    heads = legacy.get("sparse_num_index_heads") or site.number("index_n_heads", 4)
    return Weights(mixers=site.d_model * (heads + 1) * width, small=2 * width)


def _step_layers(site: Site) -> bool:
    """Layers that `moe_layers_enum` names, or those behind the third."""
    named = site.fields.get("moe_layers_enum")
    if named is None:
        return site.index >= 3
    items = named.split(",") if isinstance(named, str) else named
    return site.index in {int(item) for item in items}


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
    "afmoe": WeightRules(
        ffn=(
            Moe(
                EXPERTS,
                "moe_intermediate_size",
                shared=times(if_number("num_shared_experts", 2), "moe_intermediate_size"),
                scores=1,
                where=from_layer("num_dense_layers", 1),
            ),
        ),
        attention=(_BIASED, head_norms, output_gate()),
        norms=4,
    ),
    "aria_text": WeightRules(
        ffn=(
            Moe(
                "moe_num_experts",
                "intermediate_size",
                "moe_topk",
                shared=times(or_zero("moe_num_shared_experts"), "intermediate_size"),
                shared_bias=MLP_BIAS,
            ),
        ),
        attention=(_BIASED,),
        defaults={
            "vocab_size": 32000,
            "intermediate_size": 4096,
            "moe_num_experts": 8,
            "moe_topk": 2,
            "moe_num_shared_experts": 2,
        },
    ),
    "beam": WeightRules(
        ffn=(Moe(EXPERTS, "moe_intermediate_size", where=_behind(3)),),
        attention=(_BIASED, head_norms, output_gate(), sinks),
        norms=4,
    ),
    "cohere2_moe": WeightRules(
        ffn=(
            Moe(
                EXPERTS,
                "intermediate_size",
                shared=times(if_number("num_shared_experts", 0), "intermediate_size"),
                where=mlp_types(from_layer()),
            ),
        ),
        attention=(_BIASED,),
        norms=1,
        tied=TIED,
    ),
    "dbrx": WeightRules(ffn=(_dbrx_experts,)),
    "dots1": WeightRules(
        ffn=(replace(DEEPSEEK_MOE, where=from_layer()),), attention=(_BIASED, head_norms)
    ),
    "ernie4_5_moe": WeightRules(
        ffn=(
            Moe(
                "moe_num_experts",
                "moe_intermediate_size",
                "moe_k",
                shared=times(if_number("moe_num_shared_experts", 2), "moe_intermediate_size"),
                shared_bias=_USE_BIAS,
                scores=1,
                where=_ernie_layers,
                otherwise=dense(bias=_USE_BIAS),
            ),
        ),
        attention=(biases(_USE_BIAS, _USE_BIAS),),
        tied=TIED,
        model=(when(_USE_BIAS, small("vocab_size")),),
    ),
    "exaone_moe": WeightRules(
        ffn=(
            Moe(
                EXPERTS,
                "moe_intermediate_size",
                shared=_SHARED,
                where=mlp_types(from_layer(absent=1)),
            ),
        ),
        attention=(head_norms,),
    ),
    "flex_olmo": WeightRules(
        ffn=(replace(MIXTRAL_MOE, experts=EXPERTS),), attention=(_BIASED, width_norms)
    ),
    "flint": WeightRules(
        ffn=(replace(QWEN_MOE, shared=SHARED_EXPERT),),
        attention=(_BIASED, head_norms, sinks),
    ),
    "glm4v_moe_text": WeightRules(
        ffn=(replace(DEEPSEEK_MOE, where=from_layer(absent=1)),),
        attention=(biases(Flag("attention_bias", True)),),
        defaults={
            "vocab_size": 151424,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "glm4_moe": WeightRules(
        ffn=(replace(DEEPSEEK_MOE, where=from_layer(absent=1)),),
        attention=(biases(ATTENTION_BIAS), when(Flag("use_qk_norm", False), head_norms)),
    ),
    "gpt_oss": WeightRules(
        ffn=(replace(MIXTRAL_MOE, bias=True),),
        attention=(biases(Flag("attention_bias", True), Flag("attention_bias", True)), sinks),
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoe_swa": replace(_GRANITE_SHARED, attention=(_BIASED, sinks)),
    "granitemoeshared": _GRANITE_SHARED,
    "hunyuan_v1_moe": WeightRules(
        ffn=(Moe(EXPERTS, "intermediate_size", "moe_topk", shared="intermediate_size"),),
        attention=(_BIASED, head_norms),
    ),
    "hy_v3": WeightRules(
        ffn=(
            Moe(
                EXPERTS,
                "moe_intermediate_size",
                shared=_SHARED,
                shared_bias=MLP_BIAS,
                where=_behind(1),
                otherwise=dense(bias=MLP_BIAS),
            ),
        ),
        attention=(_BIASED, head_norms),
    ),
    "kolibri1": WeightRules(
        ffn=(Moe(EXPERTS, "moe_intermediate_size", shared=SHARED_EXPERT),),
        attention=(head_norms,),
        norms=4,
    ),
    "laguna": WeightRules(
        ffn=(
            Moe(
                EXPERTS,
                "moe_intermediate_size",
                shared=SHARED_EXPERT,
                scores=1,
                where=_behind(1),
            ),
        ),
        attention=(_BIASED, head_norms, head_gate),
    ),
    "llama4_text": WeightRules(
        ffn=(
            replace(
                MIXTRAL_MOE,
                shared="intermediate_size",
                where=_llama4_layers,
                otherwise=dense("intermediate_size_mlp"),
            ),
        ),
        attention=(_BIASED,),
        defaults={
            "vocab_size": 202048,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
        },
    ),
    "mellum": replace(
        _QWEN3_MOE, ffn=(replace(QWEN_MOE, where=_behind(0)),), attention=(_BIASED, head_norms)
    ),
    "mimo_v2_flash": WeightRules(
        ffn=(Moe(ROUTED_EXPERTS, "moe_intermediate_size", where=_behind(1)),),
        attention=(
            biases(ATTENTION_BIAS),
            lambda site: sinks(site) if site.layer.span is not None else Weights(),
        ),
    ),
    "minimax_m2": replace(_MIXTRAL, attention=(width_norms,)),
    "minimax_m3_vl_text": WeightRules(
        ffn=(
            replace(
                MIXTRAL_MOE,
                shared=if_number("shared_intermediate_size", 3072),
                where=mlp_types(_minimax_layers),
                otherwise=dense("dense_intermediate_size"),
            ),
        ),
        attention=(head_norms, _minimax_index),
        defaults={
            "vocab_size": 200064,
            "intermediate_size": 3072,
            "dense_intermediate_size": 12288,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
    ),
    "mixtral": _MIXTRAL,
    "olmoe": WeightRules(
        ffn=(replace(MIXTRAL_MOE, experts=EXPERTS),), attention=(_BIASED, width_norms)
    ),
    "phimoe": replace(
        _GRANITE_MOE,
        norm_bias=True,
        model=(when(Flag("lm_head_bias", False), small("vocab_size")),),
    ),
    "qwen2_moe": WeightRules(
        ffn=(replace(QWEN_MOE, shared=SHARED_EXPERT, shared_gate=True),),
        attention=(biases(Flag("qkv_bias", True)),),
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
    "sarvam_moe": WeightRules(
        ffn=(replace(DEEPSEEK_MOE, where=from_layer(absent=1)),),
        attention=(biases(ATTENTION_BIAS), when(Flag("use_qk_norm", True), head_norms)),
    ),
    "step3p5": WeightRules(
        ffn=(
            Moe(
                Count("n_routed_experts", also=("moe_num_experts", "num_local_experts")),
                "moe_intermediate_size",
                Count("num_experts_per_tok", also=("moe_top_k",)),
                shared=Count("share_expert_dim", absent=1280, also=("share_expert_dims",)),
                shared_bias=MLP_BIAS,
                where=mlp_types(_step_layers),
                otherwise=dense(bias=MLP_BIAS),
            ),
        ),
        attention=(_BIASED, head_norms, head_gate),
        defaults={
            "vocab_size": 128815,
            "intermediate_size": 11264,
            "moe_intermediate_size": 1280,
            "n_routed_experts": 288,
            "num_experts_per_tok": 8,
        },
    ),
    "solar_open": WeightRules(
        ffn=(replace(DEEPSEEK_MOE, where=lambda site: True),), attention=(biases(ATTENTION_BIAS),)
    ),
}
