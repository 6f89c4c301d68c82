"""Families with a dense feed-forward layer after each attention."""

from __future__ import annotations

from dataclasses import replace

from kvjax.sizing.config import Flag
from kvjax.sizing.weights.figures import Weights
from kvjax.sizing.weights.parts import (
    ATTENTION_BIAS,
    D_FF,
    MLP_BIAS,
    Site,
    UnknownSizeError,
    biases,
    dense,
    head_norms,
    sinks,
    small,
    when,
    width_norms,
)
from kvjax.sizing.weights.rules import TIED, WeightRules

_BIASED = biases(ATTENTION_BIAS, ATTENTION_BIAS)
_DENSE_BIASED = dense(bias=MLP_BIAS)
_USE_BIAS = Flag("use_bias", False)


def _lambdas(site: Site) -> Weights:
    """Four vectors that weigh the two attentions of a head (differential attention)."""
    return Weights(small=4 * site.layer.key_dim)


def _one_vocabulary(site: Site) -> Weights:
    """Apertus 1.5 may put out other tokens than it takes, which is not counted here."""
    if site.fields.has("output_vocab_size"):
        raise UnknownSizeError("output_vocab_size")
    return Weights()


def _sub_norms(site: Site) -> Weights:
    """BitNet's norms before the output projections of attention and of the feed-forward layer."""
    return Weights(small=site.d_model + site.size(D_FF))


def _dynamic_mask(site: Site) -> Weights:
    """Doge: a mask made from the values, and residual scales."""
    layer = site.layer
    if site.fields.flag(Flag("is_moe", False)):
        raise UnknownSizeError("is_moe")
    bias = site.fields.flag(ATTENTION_BIAS)
    mask = layer.kv_heads * (1 + bias + layer.kv_heads * layer.value_dim)
    return Weights(small=mask + 2 * site.d_model)


_LLAMA = WeightRules(
    ffn=(_DENSE_BIASED,),
    attention=(_BIASED,),
    defaults={"vocab_size": 32000, "intermediate_size": 11008},
)
_MISTRAL = WeightRules(defaults={"vocab_size": 32000, "intermediate_size": 14336})
_QWEN2 = WeightRules(
    attention=(biases(True),), defaults={"vocab_size": 151936, "intermediate_size": 22016}
)
_QWEN2_VL = replace(_QWEN2, defaults={"vocab_size": 152064, "intermediate_size": 29568})
_QWEN3 = WeightRules(
    attention=(_BIASED, head_norms), defaults={"vocab_size": 151936, "intermediate_size": 22016}
)
_GEMMA = WeightRules(
    attention=(_BIASED,), tied=TIED, defaults={"vocab_size": 256000, "intermediate_size": 24576}
)
_GEMMA2 = replace(_GEMMA, norms=4, defaults={"vocab_size": 256000, "intermediate_size": 9216})
_OLMO2 = WeightRules(attention=(_BIASED, width_norms))
_GRANITE = replace(_LLAMA, defaults={"vocab_size": 32000, "intermediate_size": 11008})
_COHERE = WeightRules(
    attention=(_BIASED, when(Flag("use_qk_norm", False), width_norms)), norms=1, tied=TIED
)
_HUNYUAN = WeightRules(
    attention=(_BIASED, head_norms),
    defaults={"vocab_size": 290943, "intermediate_size": 11008},
)
_ERNIE = WeightRules(
    ffn=(dense(bias=_USE_BIAS),), attention=(biases(_USE_BIAS, _USE_BIAS),), tied=TIED
)
_GLM = WeightRules(attention=(biases(Flag("attention_bias", True)),))
# The activation (xIELU) has two learned numbers.
_APERTUS = WeightRules(
    ffn=(dense(matrices=2), small(2)),
    attention=(_BIASED, head_norms),
    defaults={"vocab_size": 131072, "intermediate_size": 14336},
)
_PLAIN_FFN = dense(matrices=2, bias=MLP_BIAS)

# Cross-attention layers have norms on queries and keys and two gates, one number each.
_MLLAMA = WeightRules(
    attention=(
        lambda site: head_norms(site) + Weights(small=2) if site.layer.cross else Weights(),
    ),
    cross_alone=True,
    # Eight more tokens that are read and never written.
    model=(lambda site: Weights(lookup=8 * site.d_model),),
    defaults={"vocab_size": 128256, "intermediate_size": 14336},
)

RULES = {
    "apertus": _APERTUS,
    "apertus1p5_text": replace(
        _APERTUS,
        model=(_one_vocabulary,),
        defaults={"vocab_size": 266752, "intermediate_size": 14336},
    ),
    "arcee": WeightRules(ffn=(_PLAIN_FFN,), attention=(_BIASED,)),
    "bitnet": WeightRules(ffn=(dense(), _sub_norms), attention=(_BIASED,)),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, attention=(_BIASED,)),
    "cohere_compass_text": replace(
        _COHERE,
        attention=(_BIASED,),
        defaults={"vocab_size": 256000, "intermediate_size": 22528},
    ),
    "cwm": replace(_LLAMA, attention=()),
    "diffllama": replace(_LLAMA, ffn=(dense(),), attention=(_BIASED, _lambdas)),
    "doge": replace(_LLAMA, attention=(_BIASED, head_norms, _dynamic_mask)),
    "ernie4_5": _ERNIE,
    "paddleocr_vl_text": replace(
        _ERNIE, defaults={"vocab_size": 103424, "intermediate_size": 3072}
    ),
    "emu3_text_model": replace(_LLAMA, defaults={"vocab_size": 184622, "intermediate_size": 14336}),
    "exaone": _LLAMA,
    "exaone4": WeightRules(attention=(head_norms,)),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        attention=(_BIASED, head_norms),
        defaults={"vocab_size": 262208, "intermediate_size": 9216},
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, norms=4),
    "glm_ocr_text": WeightRules(norms=4, defaults={"vocab_size": 59392, "intermediate_size": 4096}),
    "glm4v_text": replace(
        _GLM,
        attention=(biases(Flag("attention_bias", True)),),
        norms=4,
        defaults={"vocab_size": 151552, "intermediate_size": 13696},
    ),
    "granite": _GRANITE,
    "granite4_vision_text": _GRANITE,
    "granite_docling_text": replace(
        _GRANITE, tied=TIED, defaults={"vocab_size": 133800, "intermediate_size": 2048}
    ),
    "granite_swa": replace(_GRANITE, attention=(_BIASED, sinks), tied=TIED),
    "helium": replace(_LLAMA, attention=(biases(ATTENTION_BIAS),)),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_vl_text": _HUNYUAN,
    "hyperclovax": replace(
        _LLAMA, norms=lambda site: 4 if site.fields.flag(Flag("use_post_norm", True)) else 2
    ),
    "internlm3": _LLAMA,
    "iquestcoder": _LLAMA,
    "llama": _LLAMA,
    "ministral": _MISTRAL,
    "mllama_text_model": _MLLAMA,
    "ministral3": _MISTRAL,
    "mistral": _MISTRAL,
    "nemotron": WeightRules(ffn=(_PLAIN_FFN,), attention=(_BIASED,), norm_bias=True),
    "olmo": WeightRules(attention=(_BIASED,), norms=0, last_norm=False),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "phi3": WeightRules(defaults={"vocab_size": 32064, "intermediate_size": 8192}),
    "qwen2": _QWEN2,
    "qwen2_5_omni_text": replace(
        _QWEN2, defaults={"vocab_size": 152064, "intermediate_size": 18944}
    ),
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "seed_oss": replace(
        _LLAMA, attention=(biases(Flag("attention_bias", True), Flag("attention_out_bias", False)),)
    ),
    "smollm3": replace(_LLAMA, tied=TIED),
    "stablelm": WeightRules(
        attention=(
            biases(Flag("use_qkv_bias", False)),
            when(Flag("qk_layernorm", False), width_norms),
        ),
        norms=lambda site: 1 if site.fields.flag(Flag("use_parallel_residual", False)) else 2,
        norm_bias=True,
    ),
    "vaultgemma": replace(_GEMMA2, norms=2),
}
