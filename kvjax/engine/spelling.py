"""Evictions as a command line spells them."""

from __future__ import annotations

from kvjax.engine.compress import Eviction
from kvjax.evict import POLICIES

SPELLINGS = ("POLICY:BUDGET", "POLICY:BUDGET/EVERY")


def read_eviction(text: str) -> Eviction:
    """The eviction that a text names.

    "snapkv:256" keeps 256 tokens of each layer; "snapkv:256/64" does so again whenever 64 tokens
    have come, instead of `Eviction.every`.

    Raises:
      ValueError: the text names none.
    """
    name, _, sizes = text.partition(":")
    budget, slash, every = sizes.partition("/")
    try:
        numbers = [int(size) for size in ((budget, every) if slash else (budget,))]
        return Eviction(POLICIES[name], *numbers)
    except (KeyError, ValueError):
        raise ValueError(
            f"eviction: got {text!r}; accepted: {' or '.join(SPELLINGS)}, numbers of tokens from 1 "
            f"on, with one of the policies {', '.join(POLICIES)}"
        ) from None
