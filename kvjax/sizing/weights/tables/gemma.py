"""Gemma 3n and Gemma 4: embeddings of each layer's own, and what comes with them."""

from __future__ import annotations

from dataclasses import replace

from kvjax.sizing.config import Flag
from kvjax.sizing.weights.figures import Experts, Weights
from kvjax.sizing.weights.parts import (
    ATTENTION_BIAS,
    D_FF,
    Site,
    biases,
    dense,
    head_norms,
    norms,
)
from kvjax.sizing.weights.rules import TIED, WeightRules

_BIASED = biases(ATTENTION_BIAS, ATTENTION_BIAS)
_PER_LAYER, _PER_LAYER_VOCAB = "hidden_size_per_layer_input", "vocab_size_per_layer_input"


def _layer_input(site: Site) -> Weights:
    """A gate and a projection for the layer's own embedding of the token, and a norm."""
    width = site.number(_PER_LAYER, 256)
    return Weights(mixers=2 * site.d_model * width, small=site.d_model)


def _layer_input_if_any(site: Site) -> Weights:
    return _layer_input(site) if site.number(_PER_LAYER, 256) else Weights()


def _layer_tables(site: Site) -> Weights:
    """The tables of the layers' own embeddings, and what makes the same of the model's."""
    width = site.number(_PER_LAYER, 256)
    rows, columns = site.number(_PER_LAYER_VOCAB, 262144), site.depth * width
    return Weights(lookup=rows * columns, mixers=site.d_model * columns, small=width)


# --- Gemma 3n


def _altup(site: Site) -> Weights:
    """Alternating updates (Baykal et al. 2023) and a learned augmented residual of low rank."""
    streams, rank = site.number("altup_num_inputs", 4), site.number("laurel_rank", 64)
    coefficients = streams**2 + streams**3
    return Weights(
        mixers=2 * site.d_model * rank,
        small=coefficients + site.d_model * (streams + 3),
    )


def _altup_projections(site: Site) -> Weights:
    """To and from the further streams."""
    return Weights(mixers=2 * (site.number("altup_num_inputs", 4) - 1) * site.d_model**2)


# --- Gemma 4


def _shared_width(site: Site) -> int:
    """Layers that read another's records may be twice as wide."""
    double = site.fields.flag(Flag("use_double_wide_mlp", False))
    return site.size(D_FF) * (1 + (double and site.layer.shares_with is not None))


def _gemma4_projections(site: Site) -> int:
    """Full attention may take its keys for values too."""
    layer = site.layer
    tied = site.fields.flag(Flag("attention_k_eq_v", False)) and layer.window is None
    own = layer.shares_with is None
    values = site.d_model * layer.kv_heads * layer.value_dim * (tied and own)
    return layer.attention_parameters(site.d_model) - values


def _gemma4_experts(site: Site) -> Weights:
    """Experts beside the dense layer, with a scale for each, one of D and three norms."""
    if not site.fields.flag(Flag("enable_moe_block", False)):
        return Weights()
    count, width = site.size("num_experts"), site.size("moe_intermediate_size")
    router = count * (site.d_model + 1) + site.d_model
    experts = Experts(count, site.size("top_k_experts"), 3 * site.d_model * width)
    return Weights(small=router, experts=(experts,)) + norms(3)(site)


_GEMMA4 = WeightRules(
    ffn=(dense(_shared_width), _layer_input_if_any, _gemma4_experts),
    attention=(_BIASED, head_norms),
    norms=4,
    tied=TIED,
    model=(_layer_tables,),
    projections=_gemma4_projections,
    defaults={
        "vocab_size": 262144,
        "intermediate_size": 9216,
        _PER_LAYER: 256,
        _PER_LAYER_VOCAB: 262144,
    },
)

RULES = {
    "gemma3n_text": WeightRules(
        ffn=(dense(), _layer_input, _altup),
        attention=(_BIASED, head_norms),
        norms=4,
        tied=TIED,
        model=(_layer_tables, _altup_projections),
        defaults={
            "vocab_size": 262400,
            "intermediate_size": 16384,
            _PER_LAYER: 256,
            _PER_LAYER_VOCAB: 262144,
            "laurel_rank": 64,
            "altup_num_inputs": 4,
        },
    ),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(_GEMMA4, ffn=(dense(_shared_width), _gemma4_experts), model=()),
}
