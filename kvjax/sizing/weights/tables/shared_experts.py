"""Families with routed experts beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from kvjax.sizing.checks import whole
from kvjax.sizing.config import Count, Flag
from kvjax.sizing.weights.figures import Weights
from kvjax.sizing.weights.moe import (
    DEEPSEEK_MOE,
    EXPERTS,
    MIXTRAL_MOE,
    QWEN_MOE,
    SHARED_EXPERT,
    Moe,
    behind,
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
)
from kvjax.sizing.weights.rules import TIED, WeightRules

_BIASED = biases(ATTENTION_BIAS, ATTENTION_BIAS)
_SHARED = times(if_number("num_shared_experts", 1), "moe_intermediate_size")
_USE_BIAS = Flag("use_bias", False)


def _ernie_layers(site: Site) -> bool:
    """Each so many-th layer, from one index to another."""
    start, step = site.number("moe_layer_start_index", 1), site.number("moe_layer_interval", 1, 1)
    last = site.fields.number("moe_layer_end_index", -1, -1)
    last = site.depth - 1 if last == -1 else last
    return (site.index + 1) % step == 0 and start <= site.index <= last


def _llama4_layers(site: Site) -> bool:
    """Layers that `moe_layers` lists, or each so many-th."""
    listed = site.items("moe_layers")
    if listed is not None:
        return site.index in listed
    return (site.index + 1) % site.number("interleave_moe_layer_step", 1, 1) == 0


def _minimax_layers(site: Site) -> bool:
    """Layers that `moe_layer_freq` marks."""
    mark = site.item("moe_layer_freq")
    return mark is None or bool(mark)


def _minimax_index(site: Site) -> Weights:
    """MiniMax-M3's index: queries and a key, both with a norm."""
    width = site.layer.index_dim
    if not width:
        return Weights()
    legacy = site.fields.part("sparse_attention_config") or {}
    name, given = "sparse_num_index_heads", legacy.get("sparse_num_index_heads")
    heads = site.number("index_n_heads", 4) if given is None else whole(name, given)
    return Weights(mixers=site.d_model * (heads + 1) * width, small=2 * width)


def _step_layers(site: Site) -> bool:
    """Layers that `moe_layers_enum` names, or those behind the third."""
    named = site.fields.get("moe_layers_enum")
    if named is None:
        return site.index >= 3
    try:
        return site.index in map(int, named.split(",") if isinstance(named, str) else named)
    except (TypeError, ValueError):
        raise ValueError(
            f"moe_layers_enum: got {named!r}; accepted: indices of layers, with commas"
        ) from None


_DEEPSEEK_OCR = WeightRules(
    ffn=(
        replace(
            DEEPSEEK_MOE,
            shared=times(if_number("n_shared_experts", 2), "moe_intermediate_size"),
            shared_bias=MLP_BIAS,
            where=mlp_types(from_layer(absent=1)),
            otherwise=dense(bias=MLP_BIAS),
        ),
    ),
    attention=(_BIASED,),
)

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
    "deepseek_ocr2_text": _DEEPSEEK_OCR,
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
                where=behind(1),
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
                where=behind(1),
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
    "qwen2_moe": WeightRules(
        ffn=(replace(QWEN_MOE, shared=SHARED_EXPERT, shared_gate=True),),
        attention=(biases(Flag("qkv_bias", True)),),
    ),
    "sarvam_moe": WeightRules(
        ffn=(replace(DEEPSEEK_MOE, where=from_layer(absent=1)),),
        attention=(biases(ATTENTION_BIAS), when(Flag("use_qk_norm", True), head_norms)),
    ),
    "unlimited_ocr_text": _DEEPSEEK_OCR,
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
