"""Published families that transformers has no class for."""

from __future__ import annotations

from dataclasses import replace

from kvjax.sizing.config import Count, Fields, Flag
from kvjax.sizing.weights.figures import Weights
from kvjax.sizing.weights.moe import DEEPSEEK_MOE, with_frequency
from kvjax.sizing.weights.parts import Site, UnknownSizeError, biases, dense, norms
from kvjax.sizing.weights.rules import TIED, WeightRules
from kvjax.sizing.weights.tables import gpt

_PLAIN = WeightRules()
_BIAS = Flag("bias", True)


def _refined_web_norms(site: Site) -> int:
    """The first Falcon-7B has one norm for both of its parallel branches."""
    return 1 if site.fields.flag(Flag("parallel_attn", True)) else 2


def _padded_head(site: Site) -> Weights:
    """ChatGLM: token table and head, of `padded_vocab_size` rows."""
    tokens = site.size("padded_vocab_size") * site.d_model
    tied = site.fields.flag(Flag("tie_word_embeddings", False))
    return Weights(head=tokens, lookup=0 if tied else tokens)


def _searched_block(site: Site) -> Weights:
    """A block of Nemotron-NAS: attention and feed-forward layer, either as it is, linear or gone.

    `ffn_mult` is that of a layer without a gate, of which a gated one has 2/3, up to 256.
    """
    block = Fields(site.item("block_configs") or {}, site.fields.model_type)
    total = Weights()
    for name in ("attention", "ffn"):
        part = block.part(name) or {}
        if part.get("no_op"):
            continue
        total += norms(1)(site)
        if part.get("replace_with_linear"):
            total += Weights(mixers=site.d_model**2)
        elif name == "ffn":
            if "ffn_mult" not in part:
                raise UnknownSizeError("ffn_mult")
            factor = Fields(part, site.fields.model_type).factor("ffn_mult", 0)
            width = int(2 * factor * site.d_model / 3)
            total += dense(-(-width // 256) * 256)(site)
    return total


_RW_BIAS = Flag("bias", False)
_REFINED_WEB = replace(
    gpt.RULES["falcon"], ffn=(dense(lambda site: 4 * site.d_model, 2, _RW_BIAS),), norms=2
)

RULES = {
    "RefinedWeb": _REFINED_WEB,
    "RefinedWebModel": replace(_REFINED_WEB, norms=_refined_web_norms),
    "Yi": _PLAIN,
    "aquila": _PLAIN,
    "baichuan": _PLAIN,
    "chatglm": WeightRules(
        ffn=(dense("ffn_hidden_size", bias=Flag("add_bias_linear", False)),),
        attention=(biases(Flag("add_qkv_bias", False), Flag("add_bias_linear", False)),),
        vocab=0,
        model=(_padded_head,),
    ),
    "deci": _PLAIN,
    "deepseek": WeightRules(ffn=(replace(DEEPSEEK_MOE, where=with_frequency()),)),
    "internlm": WeightRules(attention=(biases(_BIAS, _BIAS),)),
    "internlm2": _PLAIN,
    "minicpm": WeightRules(tied=TIED),
    "mixformer-sequential": gpt.RULES["phi-msft"],
    "nemotron-nas": WeightRules(ffn=(_searched_block,), norms=0),
    "phi3small": WeightRules(
        ffn=(dense(Count("ff_intermediate_size", also=("intermediate_size",)), bias=True),),
        attention=(biases(True, True),),
        norm_bias=True,
        tied=TIED,
    ),
    # `intermediate_size` is that of both halves of the gated layer.
    "qwen": WeightRules(
        ffn=(dense(lambda site: site.size("intermediate_size") // 2),), attention=(biases(True),)
    ),
    "xverse": _PLAIN,
}
