"""Families of recurrent layers that are nothing like Mamba, or share blocks among layers."""

from __future__ import annotations

from dataclasses import replace

from kvjax.sizing.config import Flag
from kvjax.sizing.weights.figures import Experts, Weights
from kvjax.sizing.weights.mixers import mamba, mamba2
from kvjax.sizing.weights.parts import ATTENTION_BIAS, D_FF, Site, biases, dense, or_times
from kvjax.sizing.weights.rules import TIED, WeightRules

# --- Griffin


def _rg_lru(site: Site) -> Weights:
    """RecurrentGemma's block: two ways in, a convolution, RG-LRU with gates by head, a way out."""
    width = site.layer.states[-1].elements
    heads = site.size("num_attention_heads")
    kernel = site.number("conv1d_width", 4)
    gates = 2 * width * (width // heads)
    vectors = 4 * width + 2 * width + site.d_model
    return Weights(mixers=3 * site.d_model * width + gates + width * kernel, small=vectors)


# --- RWKV


def _rwkv_width(site: Site) -> int:
    return site.number("attention_hidden_size") or site.d_model


def _rwkv(site: Site) -> Weights:
    """RWKV-4's time mixing."""
    width = _rwkv_width(site)
    return Weights(mixers=4 * site.d_model * width, small=2 * width + 3 * site.d_model)


def _rwkv_channels(site: Site) -> Weights:
    """RWKV-4's channel mixing, and the first layer's further norm."""
    d_model, d_ff = site.d_model, site.size(or_times(D_FF))
    return Weights(
        ffn=d_model * (2 * d_ff + d_model), small=2 * d_model + 2 * d_model * (site.index == 0)
    )


# --- xLSTM


def _mlstm(site: Site) -> Weights:
    """mLSTM: q, k, v, output gate and output, and an input and a forget gate a head."""
    matrix, normalizer, maximum = site.layer.states
    heads, keys = maximum.elements, normalizer.elements
    values = matrix.elements * heads // keys
    d_model, bias = site.d_model, site.fields.flag(Flag("use_bias", False))
    biases = (2 * keys + 3 * values + 3 * d_model) * bias
    return Weights(
        mixers=d_model * (2 * keys + 3 * values + 2 * heads), small=2 * heads + values + biases
    )


def _xlstm_width(site: Site) -> int:
    """`ffn_proj_factor` D, up to a multiple."""
    factor = site.fields.factor("ffn_proj_factor", 2.667)
    multiple = site.number("ffn_round_up_to_multiple_of", 64, 1)
    return int((site.d_model * factor + multiple - 1) // multiple * multiple)


_ADDED_BIAS = Flag("add_bias_linear", False)

# --- Zamba: a transformer block that several layers share


def _place(site: Site) -> int:
    """How many layers before this one attend."""
    return sum(layer.kind != "state" for layer in site.spec.layers[: site.index])


def _shared(site: Site) -> bool:
    """Whether a layer's block is one that an earlier layer has."""
    return _place(site) >= site.number("num_mem_blocks", 1)


def _zamba_projections(site: Site) -> int:
    """q, k and v see the layer's input beside the model's, 2 D wide."""
    layer = site.layer
    widths = 2 * layer.query_heads * layer.key_dim + 4 * layer.kv_heads * layer.key_dim
    out = layer.query_heads * layer.value_dim
    return 0 if _shared(site) else site.d_model * (widths + out)


def _zamba_block(site: Site) -> Weights:
    """The layer's own projection of what the block gives, and the block at its first layer."""
    own = Weights(mixers=site.d_model**2)
    if _shared(site):
        return own
    return own + dense()(site) + Weights(small=3 * site.d_model)


def _zamba2_block(site: Site) -> Weights:
    """Zamba 2's: each layer adapts the block by low rank."""
    rank, d_model = site.number("adapter_rank", 128), site.d_model
    adapters = rank * (d_model + 2 * site.size(D_FF))
    if site.fields.flag(Flag("use_shared_attention_adapter", False)):
        adapters += 3 * 4 * d_model * rank
    d_ff = 2 * site.size(D_FF) + d_model
    biases = d_ff * (site.fields.flag(_ADDED_BIAS) and not _shared(site))
    return _zamba_block(site) + Weights(mixers=adapters, small=biases)


# --- JetMoE: experts for q and o too


def _jetmoe(site: Site) -> Weights:
    """Routed experts in attention and behind it, each with a router and a bias for all."""
    d_model = site.d_model
    count, per_token = site.size("num_local_experts"), site.size("num_experts_per_tok")
    width = site.layer.kv_heads * site.layer.key_dim
    each = 2 * d_model * width, 3 * d_model * site.size(D_FF)
    return Weights(
        small=2 * (count * d_model + d_model),
        experts=tuple(Experts(count, per_token, size) for size in each),
    )


_ZAMBA = WeightRules(
    ffn=(),
    attention=(_zamba_block,),
    mixer=mamba("mamba_dt_rank", Flag("mamba_conv_bias", True), Flag("mamba_proj_bias", False)),
    norms=1,
    tied=TIED,
    projections=_zamba_projections,
)

RULES = {
    "jetmoe": WeightRules(
        ffn=(_jetmoe,),
        tied=TIED,
        projections=lambda site: 2 * site.d_model * site.layer.kv_heads * site.layer.key_dim,
    ),
    "recurrent_gemma": WeightRules(
        ffn=(dense(lambda site: site.size(D_FF) // 2, bias=True),),
        attention=(biases(ATTENTION_BIAS, True),),
        mixer=_rg_lru,
        tied=TIED,
    ),
    "rwkv": WeightRules(ffn=(_rwkv_channels,), mixer=_rwkv, norm_bias=True),
    "xlstm": WeightRules(
        ffn=(dense(_xlstm_width, bias=Flag("use_bias", False)),), mixer=_mlstm, tied=False
    ),
    "zamba": _ZAMBA,
    "zamba2": replace(
        _ZAMBA,
        attention=(_zamba2_block,),
        mixer=mamba2(True, _ADDED_BIAS, _ADDED_BIAS),
    ),
}
