"""Families with plain feed-forward layers, mostly of the GPT-2 line."""

from __future__ import annotations

from dataclasses import replace

from kvjax.sizing.config import Flag
from kvjax.sizing.weights.figures import Weights
from kvjax.sizing.weights.parts import (
    ATTENTION_BIAS,
    D_FF,
    Part,
    Site,
    biases,
    dense,
    norms,
    or_times,
    when,
)
from kvjax.sizing.weights.rules import TIED, WeightRules

_ALL_BIASED = biases(True, True)
_NEOX_BIAS = Flag("attention_bias", True)


def _after(name: str, offset: int) -> Part:
    """Rows of a table of positions that starts behind `offset` unused ones."""
    return lambda site: Weights(lookup=(site.size(name) + offset) * site.d_model)


def _head_norms_biased(site: Site) -> Weights:
    """LayerNorms of H, with biases, on queries and keys."""
    return Weights(small=4 * site.layer.key_dim)


def _last_layer_bias(site: Site) -> Weights:
    """GPT-NeoX Japanese: only the last layer's output projection has a bias."""
    return Weights(small=site.d_model * (site.index == site.depth - 1))


def _falcon_norms(site: Site) -> int:
    """One norm before both parallel branches, or one for each."""
    flag = site.fields.flag
    if flag(Flag("new_decoder_architecture", False)):
        return 1 if site.fields.get("num_ln_in_parallel_attn") == 1 else 2
    return 1 if flag(Flag("parallel_attn", True)) else 2


def _opt_width(site: Site) -> int:
    """Width of OPT's token table, which projections to D may follow."""
    return site.number("word_embed_proj_dim") or site.d_model


def _opt_projections(site: Site) -> Weights:
    width = _opt_width(site)
    return Weights(mixers=2 * width * site.d_model * (width != site.d_model))


def _opt_last_norm(site: Site) -> Weights:
    """OPT ends in a norm where norms come before the branches."""
    before = site.fields.flag(Flag("do_layer_norm_before", True))
    removed = site.fields.flag(Flag("_remove_final_layer_norm", False))
    return norms(int(before and not removed and _opt_norms(site) > 0), True)(site)


def _opt_norms(site: Site) -> int:
    """OPT's norms have scales and biases, or neither."""
    return 2 if site.fields.flag(Flag("layer_norm_elementwise_affine", True)) else 0


_GPT2 = WeightRules(
    ffn=(dense(or_times("n_inner"), 2, True),),
    attention=(_ALL_BIASED,),
    norm_bias=True,
    positions="n_positions",
    tied=TIED,
)
_GPTJ = WeightRules(
    ffn=(dense(or_times("n_inner"), 2, True),), norms=1, norm_bias=True, head_bias=True
)
_GPT_NEOX = WeightRules(
    ffn=(dense(D_FF, 2, True),), attention=(biases(_NEOX_BIAS, _NEOX_BIAS),), norm_bias=True
)
_PHI = WeightRules(
    ffn=(dense(D_FF, 2, True),),
    attention=(_ALL_BIASED, when(Flag("qk_layernorm", False), _head_norms_biased)),
    norms=1,
    norm_bias=True,
    head_bias=True,
    defaults={"vocab_size": 51200, "intermediate_size": 8192},
)
_OPT_BIAS = Flag("enable_bias", True)

RULES = {
    "biogpt": WeightRules(
        ffn=(dense(D_FF, 2, True),),
        attention=(_ALL_BIASED,),
        norm_bias=True,
        tied=TIED,
        model=(_after("max_position_embeddings", 2),),
    ),
    "bloom": WeightRules(
        ffn=(dense(lambda site: 4 * site.d_model, 2, True),),
        attention=(_ALL_BIASED,),
        norm_bias=True,
        tied=TIED,
        model=(norms(1, True),),
    ),
    "codegen": _GPTJ,
    "ctrl": WeightRules(
        ffn=(dense("dff", 2, True),),
        attention=(_ALL_BIASED,),
        norm_bias=True,
        tied=TIED,
        head_bias=True,
    ),
    "falcon": WeightRules(
        ffn=(dense(or_times("ffn_hidden_size"), 2, Flag("bias", False)),),
        attention=(biases(Flag("bias", False), Flag("bias", False)),),
        norms=_falcon_norms,
        norm_bias=True,
        tied=TIED,
    ),
    "gpt-sw3": _GPT2,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": replace(
        _GPT2,
        ffn=(dense(or_times("intermediate_size"), 2, True),),
        attention=(biases(o=True),),
        positions="max_position_embeddings",
    ),
    "gpt_neox": _GPT_NEOX,
    "gpt_neox_japanese": WeightRules(
        ffn=(
            dense(
                lambda site: site.number("intermediate_multiple_size", 4) * site.d_model, 2, False
            ),
        ),
        attention=(_last_layer_bias,),
        norm_bias=True,
        tied=TIED,
    ),
    "gptj": _GPTJ,
    "jais2": WeightRules(
        ffn=(dense(D_FF, 2, Flag("mlp_bias", True)),),
        attention=(biases(_NEOX_BIAS, _NEOX_BIAS),),
        norm_bias=True,
    ),
    "kvjax_gpt2": _GPT2,
    "kvjax_gpt_neox": _GPT_NEOX,
    # Half of `ffn_dim` is the gate's; one token stands for none.
    "moshi": WeightRules(
        ffn=(dense(lambda site: site.size("ffn_dim") // 2),),
        model=(lambda site: Weights(lookup=site.d_model),),
    ),
    "mpt": WeightRules(ffn=(dense(lambda site: 4 * site.d_model, 2),), tied=TIED),
    "nanochat": WeightRules(
        ffn=(dense(D_FF, 2),),
        attention=(biases(ATTENTION_BIAS, ATTENTION_BIAS),),
        norms=0,
        last_norm=False,
    ),
    "opt": WeightRules(
        ffn=(dense("ffn_dim", 2, _OPT_BIAS),),
        attention=(biases(_OPT_BIAS, _OPT_BIAS),),
        norms=_opt_norms,
        norm_bias=True,
        last_norm=False,
        tied=TIED,
        token_width=_opt_width,
        model=(_after("max_position_embeddings", 2), _opt_projections, _opt_last_norm),
    ),
    "persimmon": replace(
        _PHI,
        attention=(_ALL_BIASED, when(Flag("qk_layernorm", True), _head_norms_biased)),
        norms=2,
        head_bias=False,
        defaults={"vocab_size": 262144, "intermediate_size": 16384},
    ),
    "phi": _PHI,
    "phi-msft": replace(_PHI, ffn=(dense(or_times("n_inner"), 2, True),)),
    "xglm": WeightRules(
        ffn=(dense("ffn_dim", 2, True),),
        attention=(_ALL_BIASED,),
        norm_bias=True,
        tied=TIED,
    ),
    "starcoder2": WeightRules(
        ffn=(dense(D_FF, 2, Flag("use_bias", True)),),
        attention=(biases(Flag("use_bias", True), Flag("use_bias", True)),),
        norm_bias=True,
        tied=TIED,
    ),
}
