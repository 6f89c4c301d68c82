"""Slot arithmetic of the layouts: how many slots a sequence takes and what is kept beside them.

`tokens` is the length of the sequence and the capacity at once: a cache is sized for the sequence
that fills it.
"""

from dataclasses import dataclass
from typing import Protocol

# Beside its slots, a layer's cache keeps for each sequence its length (int32) and its overflow
# flag (bool).
_LENGTH_AND_FLAG = 4 + 1
_PAGE_NUMBER = 4


class LayoutSpec(Protocol):
    """What sizing needs to know of a layout, for one sequence in one layer."""

    def live(self, tokens: int) -> int:
        """Records that `tokens` tokens leave behind, all read by the next decode step."""
        ...

    def slots(self, tokens: int) -> int:
        """Slots allocated for them."""
        ...

    def table_bytes(self, tokens: int) -> int:
        """Bytes of lengths, flags and page tables."""
        ...


@dataclass(frozen=True)
class Dense:
    """One slot a token."""

    def live(self, tokens: int) -> int:
        return tokens

    def slots(self, tokens: int) -> int:
        return tokens

    def table_bytes(self, tokens: int) -> int:
        return _LENGTH_AND_FLAG


@dataclass(frozen=True)
class Ring:
    """The last `window` tokens; a new one takes the slot of the oldest.

    A window of W is W keys, the query's own included, and the newest key is stored before it is
    attended to: W slots (transformers' DynamicCache keeps W - 1 between steps).
    """

    window: int

    def live(self, tokens: int) -> int:
        return min(tokens, self.window)

    def slots(self, tokens: int) -> int:
        return min(tokens, self.window)

    def table_bytes(self, tokens: int) -> int:
        return _LENGTH_AND_FLAG


@dataclass(frozen=True)
class Paged:
    """Pages of `page_size` slots, found through a table of int32 page numbers (Kwon et al. 2023).

    A sequence wastes less than one page in each layer.
    """

    page_size: int

    def live(self, tokens: int) -> int:
        return tokens

    def pages(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.page_size)

    def slots(self, tokens: int) -> int:
        return self.pages(tokens) * self.page_size

    def table_bytes(self, tokens: int) -> int:
        return _LENGTH_AND_FLAG + _PAGE_NUMBER * self.pages(tokens)
