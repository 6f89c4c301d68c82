"""The parameters of a model, by the rules of its family."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvjax.sizing.config import Fields
from kvjax.sizing.weights import rules
from kvjax.sizing.weights.figures import Weights
from kvjax.sizing.weights.tables import RULES

if TYPE_CHECKING:
    from kvjax.sizing.spec import ModelSpec


def count_weights(
    fields: Fields, spec: ModelSpec, tied: object = None, own_sizes: bool = True
) -> Weights | None:
    """The parameters of a model beside its attention projections.

    Args:
        fields: the config.
        spec: the model, without its weights.
        tied: whether a model that the config is part of ties the output head to the token table,
            which goes before what the config says; None where it says nothing.
        own_sizes: whether a nested config that lacks a size means its family's default, and not
            one of the model that it is part of.

    Returns:
        None where they are not known: the family has no rule, or the config lacks a size that they
        depend on. The cache can be sized without it.
    """
    if fields.model_type not in RULES:
        return None
    family = RULES[fields.model_type]
    if isinstance(tied, bool):
        family = replace(family, tied=tied)
    if not own_sizes:
        family = replace(family, defaults={})
    return rules.count(family, fields, spec)
