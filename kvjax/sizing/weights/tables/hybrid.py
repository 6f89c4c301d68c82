"""Families with Mamba, linear attention or short convolutions."""

from __future__ import annotations

from dataclasses import replace

from kvjax.sizing.config import Count, Flag
from kvjax.sizing.families.hybrid_kinds import MLP, MOE
from kvjax.sizing.families.state_space import FAMILIES, Listed
from kvjax.sizing.weights.figures import Weights
from kvjax.sizing.weights.mixers import (
    bailing_kda,
    gated_delta,
    kda,
    lightning,
    mamba,
    mamba2,
    short_convolution,
)
from kvjax.sizing.weights.moe import (
    DEEPSEEK_MOE,
    EXPERTS,
    MIXTRAL_MOE,
    QWEN_MOE,
    ROUTED_EXPERTS,
    SHARED_EXPERT,
    Moe,
    from_layer,
    mlp_types,
)
from kvjax.sizing.weights.parts import (
    ATTENTION_BIAS,
    D_FF,
    MLP_BIAS,
    Site,
    biases,
    dense,
    head_gate,
    head_norms,
    or_zero,
    output_gate,
    when,
    width_norms,
)
from kvjax.sizing.weights.rules import TIED, UNTIED, WeightRules
from kvjax.sizing.weights.tables.latent import latent_norms

_BIASED = biases(ATTENTION_BIAS, ATTENTION_BIAS)
_CONV_BIAS, _PROJ_BIAS = Flag("mamba_conv_bias", True), Flag("mamba_proj_bias", False)
_MAMBA_BIASES = Flag("use_conv_bias", True), Flag("use_bias", False)

# --- Mamba

_MAMBA = WeightRules(ffn=(), norms=1, tied=TIED, mixer=mamba("time_step_rank", *_MAMBA_BIASES))
_BAMBA = WeightRules(
    ffn=(dense(bias=MLP_BIAS),),
    attention=(_BIASED,),
    mixer=mamba2(_CONV_BIAS, _PROJ_BIAS, _PROJ_BIAS),
)


def _jamba_layers(site: Site) -> bool:
    """Each so many-th layer, from an offset on."""
    period, offset = site.number("expert_layer_period", 2, 1), site.number("expert_layer_offset", 1)
    return site.index % period == offset and site.size(EXPERTS) > 1


def _granite_ffn(site: Site) -> Weights:
    """A layer that every token passes, beside experts if there are any."""
    shared = 3 * site.d_model * site.number("shared_intermediate_size", 1024)
    if site.fields.number("num_local_experts", 8) == 0:
        return Weights(ffn=shared)
    return Weights(shared=shared) + MIXTRAL_MOE(site)


_NEMOTRON = FAMILIES["nemotron_h"]
_NEMOTRON_MOE = Moe(
    ROUTED_EXPERTS,
    "moe_intermediate_size",
    shared=or_zero("moe_shared_expert_intermediate_size"),
    shared_bias=MLP_BIAS,
    matrices=2,
    inner="moe_latent_size",
)


def _nemotron_ffn(site: Site) -> Weights:
    """A feed-forward layer where the model's list of layers has one."""
    assert isinstance(_NEMOTRON, Listed)
    kind = _NEMOTRON.family.kinds(site.fields, site.depth)[site.index]
    if kind == MOE:
        return _NEMOTRON_MOE(site)
    return dense(D_FF, 2, MLP_BIAS)(site) if kind == MLP else Weights()


# --- linear attention

_QWEN3_NEXT = WeightRules(
    ffn=(replace(QWEN_MOE, shared=SHARED_EXPERT, shared_gate=True),),
    attention=(_BIASED, head_norms, output_gate(ATTENTION_BIAS)),
    mixer=gated_delta,
)
_QWEN3_5 = replace(
    _QWEN3_NEXT,
    ffn=(dense(),),
    defaults={"vocab_size": 248320, "intermediate_size": 12288},
)
# The published configs have other names than transformers' own.
_KIMI_EXPERTS = replace(EXPERTS, also=("num_local_experts", "n_routed_experts"))
_KIMI_PER_TOKEN = Count("num_experts_per_token", also=("num_experts_per_tok",))


def _kimi_shared(site: Site) -> int:
    later = site.number("n_shared_experts", 1)
    count = site.number("num_shared_experts", later)
    return count * site.size("moe_intermediate_size")


_MINIMAX = WeightRules(ffn=(MIXTRAL_MOE,), mixer=lightning)
_LFM2 = WeightRules(
    ffn=(dense(),),
    attention=(head_norms,),
    mixer=short_convolution(Flag("conv_bias", False)),
    tied=TIED,
)


def _lfm2_width(site: Site) -> int:
    """LFM2 takes 2/3 of the width, times a factor, up to a multiple."""
    name = "block_ff_dim" if site.fields.has("block_ff_dim") else D_FF
    width = site.size(name)
    if not site.fields.flag(Flag("block_auto_adjust_ff_dim", True)):
        return width
    width, name = 2 * width // 3, "block_ffn_dim_multiplier"
    if site.fields.get(name, 1.0) is None:
        return width
    factor, multiple = site.fields.factor(name, 1.0), site.number("block_multiple_of", 256, 1)
    return -(-int(factor * width) // multiple) * multiple


RULES = {
    "bailing_hybrid": WeightRules(
        ffn=(
            replace(
                DEEPSEEK_MOE,
                experts=_KIMI_EXPERTS,
                per_token=_KIMI_PER_TOKEN,
                shared=_kimi_shared,
                where=mlp_types(from_layer(absent=2)),
            ),
        ),
        attention=(latent_norms, head_gate),
        mixer=bailing_kda,
        tied=False,
    ),
    "bamba": _BAMBA,
    "falcon_h1": replace(
        _BAMBA,
        mixer=mamba2(
            _CONV_BIAS,
            _PROJ_BIAS,
            Flag("projectors_bias", False),
            Flag("mamba_rms_norm", False),
        ),
    ),
    "falcon_mamba": _MAMBA,
    "granitemoehybrid": replace(_BAMBA, ffn=(_granite_ffn,)),
    "jamba": WeightRules(
        ffn=(replace(MIXTRAL_MOE, experts=EXPERTS, where=_jamba_layers),),
        mixer=mamba("mamba_dt_rank", _CONV_BIAS, _PROJ_BIAS, norms=True),
    ),
    "kimi_linear": WeightRules(
        ffn=(
            replace(
                DEEPSEEK_MOE,
                experts=_KIMI_EXPERTS,
                per_token=_KIMI_PER_TOKEN,
                shared=_kimi_shared,
                where=mlp_types(from_layer(absent=1)),
            ),
        ),
        attention=(latent_norms,),
        mixer=kda,
        tied=False,
    ),
    "lara_mini": replace(
        _QWEN3_NEXT,
        ffn=(replace(QWEN_MOE, shared=SHARED_EXPERT),),
        attention=(_BIASED, head_norms),
        tied=TIED,
    ),
    "lfm2": replace(_LFM2, ffn=(dense(_lfm2_width),)),
    "lfm2_moe": replace(
        _LFM2,
        ffn=(Moe(EXPERTS, "moe_intermediate_size", where=from_layer("num_dense_layers", 2)),),
    ),
    "lfm3": replace(
        _LFM2,
        attention=(_BIASED, head_norms, when(Flag("use_attention_gate", True), head_gate)),
        norms=lambda site: 4 if site.fields.flag(Flag("use_sandwich_norm", True)) else 2,
    ),
    "mamba": _MAMBA,
    "mamba2": replace(
        _MAMBA,
        mixer=mamba2(*_MAMBA_BIASES, Flag("use_bias", False)),
        tied=UNTIED,
    ),
    "minimax": _MINIMAX,
    "minimax_m1": _MINIMAX,
    "minimax_text_01": _MINIMAX,
    "nemotron_h": WeightRules(
        ffn=(_nemotron_ffn,),
        mixer=mamba2(*_MAMBA_BIASES, Flag("use_bias", False)),
        norms=1,
        tied=False,
    ),
    "olmo_hybrid": WeightRules(attention=(_BIASED, width_norms), mixer=gated_delta),
    "qwen3_5_moe_text": replace(
        _QWEN3_NEXT,
        ffn=(
            Moe(
                EXPERTS,
                "moe_intermediate_size",
                shared=SHARED_EXPERT,
                shared_gate=True,
            ),
        ),
        defaults={
            "vocab_size": 248320,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_next": _QWEN3_NEXT,
}
