"""Layouts and codecs as a command line spells them."""

from __future__ import annotations

from kvjax.cache.codecs import codecs
from kvjax.cache.container import LAYOUTS, LayoutChoice
from kvjax.cache.kivi_codec import KIVI
from kvjax.cache.layouts import SinkRing
from kvjax.cache.paged import Paged

SPELLINGS = (*LAYOUTS, "paged", "paged:P", "sinks:N+W", "sinks:N+W:reindexed")
# Codecs of any layout, and then those that share scales over tokens.
CODECS = (*codecs(), *KIVI)


def read_layout(text: str) -> LayoutChoice:
    """The layout that a text names.

    "auto", "dense" and "ring" as they are; "paged" or "paged:32" for pages of 16 or 32 slots;
    "sinks:4+1020" for the first 4 tokens and a window of 1020, at the distances that they have in
    the text, or with ":reindexed" behind it, at those that they have in the cache.

    Raises:
      ValueError: the text names none.
    """
    for name in LAYOUTS:
        if text == name:
            return name
    kind, _, rest = text.partition(":")
    sizes, *form = rest.split(":")
    try:
        match kind, [int(size) for size in sizes.split("+") if size], form:
            case "paged", [], []:
                return Paged()
            case "paged", [page_size], [] if page_size > 0:
                return Paged(page_size)
            case "sinks", [sinks, window], [] | ["reindexed"] if sinks >= 0 and window > 0:
                return SinkRing(sinks, window, reindexed=bool(form))
    except ValueError:
        pass
    raise ValueError(f"layout: got {text!r}; accepted: {', '.join(SPELLINGS)}")
