"""Layouts as a command line spells them."""

from __future__ import annotations

from kvjax.cache.container import LAYOUTS, LayoutChoice
from kvjax.cache.layouts import SinkRing
from kvjax.cache.paged import Paged

SPELLINGS = (*LAYOUTS, "paged", "paged:P", "sinks:N+W")


def read_layout(text: str) -> LayoutChoice:
    """The layout that a text names.

    "auto", "dense" and "ring" as they are; "paged" or "paged:32" for pages of 16 or 32 slots;
    "sinks:4+1020" for the first 4 tokens and a window of 1020.

    Raises:
      ValueError: the text names none.
    """
    for name in LAYOUTS:
        if text == name:
            return name
    kind, _, sizes = text.partition(":")
    try:
        match kind, [int(size) for size in sizes.split("+") if size]:
            case "paged", []:
                return Paged()
            case "paged", [page_size] if page_size > 0:
                return Paged(page_size)
            case "sinks", [sink_tokens, window] if sink_tokens >= 0 and window > 0:
                return SinkRing(sink_tokens, window)
    except ValueError:
        pass
    raise ValueError(f"layout: got {text!r}; accepted: {', '.join(SPELLINGS)}")
