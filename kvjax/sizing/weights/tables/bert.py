"""Families of the BERT line, as decoders."""

from __future__ import annotations

from dataclasses import replace

from kvjax.sizing.weights.figures import Weights
from kvjax.sizing.weights.parts import D_FF, Site, biases, dense, norms
from kvjax.sizing.weights.rules import TIED, WeightRules


def _embeddings(site: Site) -> Weights:
    """A table of two or more types beside that of positions, and a norm."""
    types = site.number("type_vocab_size", 2) * site.d_model
    return Weights(lookup=types) + norms(1, True)(site)


def _transform(site: Site) -> Weights:
    """What the last layer's output passes before the head."""
    d_model = site.d_model
    return Weights(mixers=d_model**2, small=d_model) + norms(1, True)(site)


_BERT = WeightRules(
    ffn=(dense(D_FF, 2, True),),
    attention=(biases(True, True),),
    norm_bias=True,
    last_norm=False,
    tied=TIED,
    head_bias=True,
    positions="max_position_embeddings",
    model=(_embeddings, _transform),
)

RULES = {
    "bert": _BERT,
    "bert-generation": replace(_BERT, model=(norms(1, True),)),
    "camembert": _BERT,
    "data2vec-text": _BERT,
    "ernie": _BERT,
    "megatron-bert": _BERT,
    "roberta": _BERT,
    "roberta-prelayernorm": replace(_BERT, last_norm=True),
    "xlm-roberta": _BERT,
    "xlm-roberta-xl": _BERT,
}
