"""What parameters a family has, as data, and the count of a model by it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvjax.sizing.config import Fields, Flag
from kvjax.sizing.weights.figures import Weights
from kvjax.sizing.weights.parts import Part, Site, Size, Switch, UnknownSizeError, dense, norms

if TYPE_CHECKING:
    from kvjax.sizing.spec import ModelSpec

UNTIED = Flag("tie_word_embeddings", False)
TIED = Flag("tie_word_embeddings", True)


@dataclass(frozen=True)
class WeightRules:
    """The parameters of a family's models beside its attention projections.

    Attributes:
        ffn: what follows the attention of a decoder layer.
        attention: what a LayerSpec that attends has beside its projections.
        mixer: what a LayerSpec that keeps states has instead of attention, or beside it.
        norms: norms of D in a decoder layer.
        norm_bias: whether they and the last norm have biases.
        last_norm: whether the model ends in a norm with scales.
        tied: whether the output head is the token table.
        head_bias: whether the output head has a bias.
        positions: rows of a table of positions.
        vocab: tokens.
        token_width: width of the token table; None for D.
        model: what the model has once.
        entries: LayerSpecs of a decoder layer, beside those that attend to a source.
        cross_alone: whether a LayerSpec that attends to a source is a decoder layer of its own;
            otherwise it belongs to the one before it, and has a norm.
        projections: the projections of a LayerSpec that attends, where its kind does not tell them.
        defaults: sizes that the class takes where a nested config lacks them.
    """

    ffn: tuple[Part, ...] = (dense(),)
    attention: tuple[Part, ...] = ()
    mixer: Part | None = None
    norms: Size = 2
    norm_bias: Switch = False
    last_norm: Switch = True
    tied: Switch = UNTIED
    head_bias: bool = False
    positions: Size = 0
    vocab: Size = "vocab_size"
    token_width: Size | None = None
    model: tuple[Part, ...] = ()
    entries: int = 1
    cross_alone: bool = False
    projections: Callable[[Site], int] | None = None
    defaults: Mapping[str, int] = field(default_factory=dict)


def count(rules: WeightRules, fields: Fields, spec: ModelSpec) -> Weights | None:
    """The parameters of a model beside its attention projections, by its family's rules.

    Returns:
        None where the config lacks a size that they depend on.
    """
    starts = [i for i, layer in enumerate(spec.layers) if rules.cross_alone or not layer.cross]
    starts = starts[:: rules.entries]
    depth = len(starts)

    def site(entry: int, index: int) -> Site:
        view = fields.layer(index)
        return Site(view, spec, spec.layers[entry], index, depth, rules.defaults)

    try:
        total = _tables(rules, Site(fields, spec, spec.layers[0], 0, depth, rules.defaults))
        for index, start in enumerate(starts):
            total += _following(rules, site(start, index))
        for entry in range(len(spec.layers)):
            total += _attending(rules, site(entry, bisect_right(starts, entry) - 1))
    except UnknownSizeError:
        return None
    return total


def _following(rules: WeightRules, site: Site) -> Weights:
    """What a decoder layer has beside its attention or mixer."""
    total = norms(rules.norms, rules.norm_bias)(site)
    for part in rules.ffn:
        total += part(site)
    return total


def _attending(rules: WeightRules, site: Site) -> Weights:
    """What a LayerSpec has beside its projections."""
    total = Weights()
    if site.layer.cross and not rules.cross_alone:
        total += norms(1, rules.norm_bias)(site)
    if site.layer.kind != "state":
        for part in rules.attention:
            total += part(site)
        if rules.projections is not None:
            total += Weights(projections=rules.projections(site))
    if site.layer.states and rules.mixer is not None:
        total += rules.mixer(site)
    return total


def _tables(rules: WeightRules, site: Site) -> Weights:
    """What the model has once: tables, the head, the last norm."""
    vocab = site.size(rules.vocab)
    width = site.d_model if rules.token_width is None else site.size(rules.token_width)
    tokens = vocab * width
    total = Weights(
        head=tokens,
        lookup=site.size(rules.positions) * site.d_model
        + (0 if site.fields.flag(rules.tied) else tokens),
        small=vocab * rules.head_bias,
    )
    total += norms(int(site.fields.flag(rules.last_norm)), rules.norm_bias)(site)
    for part in rules.model:
        total += part(site)
    return total
