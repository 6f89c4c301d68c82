"""What one layer of one sequence costs by this library's layouts."""

from dataclasses import dataclass
from functools import cached_property

from kvjax.sizing import hf_caches
from kvjax.sizing.codecs import CodecSpec, Part
from kvjax.sizing.layer import LayerSpec
from kvjax.sizing.layouts import LayoutSpec, layout_of
from kvjax.sizing.placement import Placement


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cache, each figure over all layers and the whole batch.

    Attributes:
        ideal: the live records and nothing else.
        allocated: the slots that hold them, the empty ones included.
        read_per_step: what one decode step reads of them; a shared record once for each layer
            reading it.
        state: states of a fixed size: recurrences, convolutions, tokens waiting for a pool.
        tables: lengths, flags, page tables, and scales that do not grow.
    """

    ideal: int = 0
    allocated: int = 0
    read_per_step: int = 0
    state: int = 0
    tables: int = 0

    @property
    def total(self) -> int:
        """What must be in memory: allocated, state and tables; with stages, at most so much."""
        return self.allocated + self.state + self.tables


@dataclass(frozen=True)
class LayerAccount:
    """The bytes of one sequence in one layer, on one of `placement.tp` shards.

    Attributes:
        tokens: length of what the layer attends to: the sequence, or its source.
    """

    layer: LayerSpec
    tokens: int
    codec: CodecSpec
    placement: Placement

    def __post_init__(self) -> None:
        """Refuse a codec whose scales are shared by tokens that do not die together."""
        shared, together = self.codec.tokens_sharing, self._layout.dies_together
        if self._parts and together is not None and together % shared:
            raise ValueError(
                f"codec: got {self.codec.name!r}, whose scales are shared by {shared} tokens, for "
                f"a {type(self._layout).__name__.lower()} layout replacing {together} at a time; "
                f"accepted: a multiple of {shared}, or a codec with scales of single tokens"
            )

    def bytes(self) -> CacheBytes:
        """All figures; those of a layer that keeps no records of its own are zero but for reads."""
        if self.layer.shares_with is not None:
            return CacheBytes(read_per_step=self.read)
        if self.placement.definition == "kvjax":
            state = self.layer.state_bytes(self.codec.activation_itemsize, self.placement.tp)
            return CacheBytes(self.ideal, self.allocated, self.read, state, self.tables)
        held, state = hf_caches.held(
            self.layer, self.tokens, self.codec, self.placement.definition, self.placement.tp
        )
        return CacheBytes(self.ideal, held, self.read, state)

    @property
    def ideal(self) -> int:
        """Bytes of the live records and of full pool entries."""
        live = self._layout.live(self.tokens)
        records = sum(self.codec.live(live, part) for part in self._parts)
        return records + sum(
            self.codec.live(pool.entries(self.tokens), part) for pool, part in self._pools
        )

    @property
    def allocated(self) -> int:
        """Bytes of the slots of records and pools."""
        exact = self.tokens - self._laid_out
        slots = exact + self._layout_of_rest.slots(self._laid_out)
        records = sum(self.codec.allocated(slots, part) for part in self._parts)
        entries = layout_of(None, self.placement.page_size)
        return records + sum(
            self.codec.allocated(entries.slots(pool.entries(self.tokens)), part)
            for pool, part in self._pools
        )

    @property
    def read(self) -> int:
        """Bytes that one decode step reads: of an index all keys, and the records it picks."""
        live = self._layout.live(self.tokens)
        top = self.layer.index_top
        picked = live if top is None else min(live, top)
        records = sum(
            self.codec.read(picked, part) for part in self.layer.parts(self.placement.tp)
        ) + sum(self.codec.read(live, part) for part in self.layer.index_parts)
        return records + sum(
            self.codec.read(pool.read(self.tokens), part) for pool, part in self._pools
        )

    @property
    def tables(self) -> int:
        """Bytes of lengths, flags, page tables and positions."""
        if not self._parts:
            return 0
        return self._layout_of_rest.table_bytes(self._laid_out, self._parts[0].heads)

    @property
    def constants(self) -> int:
        """Bytes of scales that the layer keeps once, whatever its batch."""
        if self.layer.shares_with is not None or self.placement.definition != "kvjax":
            return 0
        return sum(self.codec.constants(part) for part in self._parts)

    @cached_property
    def _layout(self) -> LayoutSpec:
        return self.placement.layout(self.layer)

    @property
    def _laid_out(self) -> int:
        """Tokens in the layout's slots: the codec keeps the newest in slots of their own."""
        return max(self.tokens - self.codec.tokens_kept_exact, 0)

    @cached_property
    def _layout_of_rest(self) -> LayoutSpec:
        """The layout that holds them; of a window, all but what is sure to be exact."""
        least = self.codec.tokens_kept_exact - self.codec.tokens_sharing + 1
        return self.placement.layout(self.layer, least)

    @cached_property
    def _parts(self) -> tuple[Part, ...]:
        return (*self.layer.parts(self.placement.tp), *self.layer.index_parts)

    @property
    def _pools(self) -> tuple:
        return tuple((pool, Part(1, pool.width, key=True)) for pool in self.layer.pools)
