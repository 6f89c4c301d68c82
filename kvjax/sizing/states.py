"""What a layer keeps of a sequence beside its records: states, and pools of compressed entries."""

from dataclasses import dataclass

from kvjax.sizing.checks import whole


@dataclass(frozen=True)
class State:
    """A state of a fixed size: a recurrent one, or the last inputs of a short convolution.

    Attributes:
        name: "recurrent", "conv", ...
        elements: numbers of one sequence.
        shards: units (heads, groups) that tensor parallelism can spread; 1 where it cannot.
        itemsize: bytes of a number; None for that of activations.
    """

    name: str
    elements: int
    shards: int = 1
    itemsize: int | None = None

    def __post_init__(self) -> None:
        whole(f"{self.name}.elements", self.elements)
        whole(f"{self.name}.shards", self.shards)

    def nbytes(self, activation_itemsize: int, tp: int = 1) -> int:
        """Bytes of one sequence on one of `tp` shards; units repeat where there are too few."""
        units = -(-self.shards // tp)
        return -(-self.elements * units // self.shards) * (self.itemsize or activation_itemsize)


@dataclass(frozen=True)
class Pool:
    """One compressed entry for each `ratio` tokens (DeepSeek-V4's CSA and HCA), one KV head.

    Each entry is a gated mean of its tokens. Tokens that do not fill an entry yet wait as
    (value, gate) pairs; with `overlap` an entry also sees the tokens of the previous one, so that
    each token leaves two pairs and the first ones of the last full entry are kept.

    Attributes:
        ratio: tokens an entry.
        width: numbers an entry.
        overlap: whether neighbouring entries share tokens.
        top: entries that one query reads; None for all.
        gate_itemsize: bytes of a kept gate of the previous entry; None for that of activations.
        gated: whether tokens wait with a gate; entries are plain means otherwise.
        index: whether an index scores the entries to pick from the others; no query attends to
            them.
    """

    ratio: int
    width: int
    overlap: bool = False
    top: int | None = None
    gate_itemsize: int | None = None
    gated: bool = True
    index: bool = False

    def entries(self, tokens: int) -> int:
        """Entries that `tokens` tokens fill."""
        return tokens // self.ratio

    def read(self, tokens: int) -> int:
        """Entries that the next query reads."""
        entries = self.entries(tokens)
        return entries if self.top is None else min(entries, self.top)

    def waiting_bytes(self, waiting: int, activation_itemsize: int) -> int:
        """Bytes of the pairs of `waiting` tokens."""
        kept = (2 if self.overlap else 1) * (2 if self.gated else 1)
        return waiting * self.width * kept * activation_itemsize

    def previous_bytes(self, activation_itemsize: int) -> int:
        """Bytes of the pairs kept of the last full entry."""
        if not self.overlap:
            return 0
        gate = self.gate_itemsize or activation_itemsize
        return self.ratio * self.width * (activation_itemsize + gate)
