"""Slot arithmetic of the layouts: how many slots a sequence takes and what is kept beside them.

`tokens` is the length of the sequence and the capacity at once: a cache is sized for the sequence
that fills it.
"""

from dataclasses import dataclass
from typing import Protocol

from kvjax.sizing.checks import whole

# Beside its slots, a layer's cache keeps for each sequence its length (int32) and its overflow
# flag (bool).
_LENGTH_AND_FLAG = 4 + 1
_PAGE_NUMBER = 4
_POSITION = _COUNT = 4


class LayoutSpec(Protocol):
    """What sizing needs to know of a layout, for one sequence in one layer."""

    @property
    def dies_together(self) -> int | None:
        """Tokens that are replaced or freed together; None where none ever is."""
        ...

    def live(self, tokens: int) -> int:
        """Records that `tokens` tokens leave behind, all read by the next decode step."""
        ...

    def slots(self, tokens: int) -> int:
        """Slots allocated for them."""
        ...

    def table_bytes(self, tokens: int, heads: int = 1) -> int:
        """Bytes of lengths, flags, page tables and positions, beside records of so many heads."""
        ...


@dataclass(frozen=True)
class Dense:
    """One slot a token."""

    @property
    def dies_together(self) -> None:
        return None

    def live(self, tokens: int) -> int:
        return tokens

    def slots(self, tokens: int) -> int:
        return tokens

    def table_bytes(self, tokens: int, heads: int = 1) -> int:
        return _LENGTH_AND_FLAG


@dataclass(frozen=True)
class Ring:
    """The last `window` tokens; a new one takes the slot of the oldest.

    A window of W is W keys, the query's own included, and the newest key is stored before it is
    attended to: W slots (transformers' DynamicCache keeps W - 1 between steps).

    Attributes:
        window: W; for chunked attention the chunk, of which at most all is seen.
        in_flight: tokens written at once before the first of them is attended (a chunk of a
            prefill, a draft): the first still sees its W - 1 predecessors.
        multiple: slots are rounded up to a multiple of it, as kernels with blocks need.
    """

    window: int
    in_flight: int = 1
    multiple: int = 1

    @property
    def dies_together(self) -> int:
        return 1

    def live(self, tokens: int) -> int:
        return min(tokens, self.window)

    def slots(self, tokens: int) -> int:
        return min(_round_up(tokens, self.multiple), self.full)

    @property
    def full(self) -> int:
        """Slots of a ring that has wrapped around."""
        return _round_up(self.window + self.in_flight - 1, self.multiple)

    def table_bytes(self, tokens: int, heads: int = 1) -> int:
        return _LENGTH_AND_FLAG


@dataclass(frozen=True)
class Paged:
    """Pages of `page_size` slots, found through a table of int32 page numbers (Kwon et al. 2023).

    A sequence wastes less than one page in each layer. With a window, pages that no query can see
    any more are freed; the window's keys lie in one page more than they would fill.
    """

    page_size: int
    window: int | None = None
    in_flight: int = 1

    @property
    def dies_together(self) -> int:
        return self.page_size

    def live(self, tokens: int) -> int:
        return tokens if self.window is None else min(tokens, self.window)

    def pages(self, tokens: int) -> int:
        """Pages that `tokens` tokens hold."""
        pages = -(-tokens // self.page_size)
        if self.window is None:
            return pages
        seen = self.window + self.in_flight - 1
        # `seen` neighbouring tokens that begin in the last slot of a page touch the most pages.
        return min(pages, -(-(seen - 1) // self.page_size) + 1)

    def slots(self, tokens: int) -> int:
        return self.pages(tokens) * self.page_size

    def table_bytes(self, tokens: int, heads: int = 1) -> int:
        return _LENGTH_AND_FLAG + _PAGE_NUMBER * self.pages(tokens)


@dataclass(frozen=True)
class Kept:
    """What an eviction leaves: at most `budget` tokens, and room for new ones.

    Beside each slot is its token's position, and beside the length how much is live and what the
    length was at the eviction.

    Attributes:
        budget: tokens kept of a sequence.
        room: further slots, for tokens to come.
        per_head: whether each head keeps tokens of its own, with positions and a count of its own.
    """

    budget: int
    room: int = 0
    per_head: bool = False

    def __post_init__(self) -> None:
        whole("budget", self.budget)
        whole("room", self.room, 0)

    @property
    def dies_together(self) -> int:
        return 1

    def live(self, tokens: int) -> int:
        return min(tokens, self.budget)

    def slots(self, tokens: int) -> int:
        return min(tokens, self.budget) + self.room

    def table_bytes(self, tokens: int, heads: int = 1) -> int:
        sets = heads if self.per_head else 1
        return sets * (_POSITION * self.slots(tokens) + _COUNT) + _COUNT + _LENGTH_AND_FLAG


def layout_of(
    span: int | None,
    page_size: int | None = None,
    in_flight: int = 1,
    ring_multiple: int = 1,
    kept: Kept | None = None,
) -> LayoutSpec:
    """The layout of a layer whose queries see `span` keys: pages if asked for, else ring or dense.

    A dense one, of which tokens were evicted, is `kept`; rings lose none.

    Raises:
        ValueError: names the argument that is not a whole number of at least 1.
    """
    in_flight, multiple = whole("in_flight", in_flight), whole("ring_multiple", ring_multiple)
    if kept is not None and span is None:
        return kept
    if page_size is not None:
        return Paged(whole("page_size", page_size), span, in_flight)
    return Dense() if span is None else Ring(span, in_flight, multiple)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
