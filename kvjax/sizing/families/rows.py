"""Short forms for the rows of the tables."""

from dataclasses import replace

from kvjax.sizing.config import Count
from kvjax.sizing.families.family import (
    FULL,
    HEAD_DIM,
    KV_HEADS,
    SLIDING,
    Family,
    Kinds,
    Sizes,
    full,
    sliding,
)


def kv_heads(absent: int) -> Count:
    """K that is N where null, and `absent` where the config lacks it."""
    return replace(KV_HEADS, absent=absent)


def fixed_kv_heads(absent: int) -> Count:
    """K that the class takes as it is: null is refused."""
    return Count("num_key_value_heads", absent=absent)


def head_dim(absent: int) -> Count:
    """H that is D / N where null, and `absent` where the config lacks it."""
    return replace(HEAD_DIM, absent=absent)


def fixed_head_dim(absent: int) -> Count:
    """H that the class takes as it is: null is refused."""
    return Count("head_dim", absent=absent)


def windowed(
    sized: Sizes,
    kv: Count | None = KV_HEADS,
    dim: Count | None = HEAD_DIM,
    *,
    kinds: Kinds,
    window: int | None = None,
    ignores: frozenset[str] = frozenset(),
) -> Family:
    """A family of which some layers see `sliding_window` keys.

    Args:
        sized, kv, dim, kinds: as of Family.
        window: W where the config lacks it; None refuses that.
        ignores: as of Family. A W is no fault where no layer has a window, nor are layers that
            predict tokens beyond the next, which generation does not run.
    """
    layers = {FULL: full, SLIDING: sliding(absent=window)}
    harmless = {"sliding_window", "num_nextn_predict_layers"}
    return Family(sized, kv, dim, kinds, layers, ignores=ignores | harmless)
