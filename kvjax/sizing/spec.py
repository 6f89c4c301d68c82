"""A model's cache as data, and the arithmetic over its layers."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvjax.sizing import chips, codecs
from kvjax.sizing.checks import whole
from kvjax.sizing.codecs import CodecSpec
from kvjax.sizing.layer import LayerSpec
from kvjax.sizing.layouts import Dense, LayoutSpec, Paged, Ring
from kvjax.sizing.roofline import Chip, DecodeFloor, decode_floor
from kvjax.sizing.weights import Weights


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cache, each figure over all layers and the whole batch.

    Attributes:
        ideal: the live records and nothing else.
        allocated: the slots that hold them, the empty ones included.
        read_per_step: what one decode step reads; a shared record once for each layer reading it.
        state: states that do not grow with the length; zero for attention.
        tables: lengths, flags and page tables.
    """

    ideal: int
    allocated: int
    read_per_step: int
    state: int
    tables: int


@dataclass(frozen=True)
class ModelSpec:
    """The cache of a model: one `LayerSpec` a layer.

    Attributes:
        model_type: the family, as config.json spells it.
        d_model: D.
        layers: all layers in order.
        weights: parameters beside the attention projections; None where they are not known.
    """

    model_type: str
    d_model: int
    layers: tuple[LayerSpec, ...]
    weights: Weights | None = None

    def __post_init__(self) -> None:
        whole("d_model", self.d_model)
        if not self.layers:
            raise ValueError("layers: got none; accepted: at least one LayerSpec")
        for index, layer in enumerate(self.layers):
            self._check_sharing(index, layer)

    def cache_bytes(
        self,
        tokens: int,
        batch: int = 1,
        codec: str | CodecSpec = "bf16",
        *,
        page_size: int | None = None,
        tp: int = 1,
        definition: str = "kvjax",
    ) -> CacheBytes:
        """Bytes of the cache of `batch` sequences that fill `tokens` tokens each.

        Args:
            tokens: length, and capacity, of every sequence; 0 or more.
            batch: B.
            codec: name or spec of the codec.
            page_size: P, slots a page, of a paged cache; None for one run of slots a sequence.
            tp: shards that the KV heads are spread over; the bytes are those of one shard.
            definition: whose `allocated` is given; only this library's, "kvjax", so far.

        Raises:
            ValueError: names the argument, what was given and what is accepted.
        """
        if definition != "kvjax":
            raise ValueError(f"definition: got {definition!r}; accepted: 'kvjax'")
        tokens, batch, tp = whole("tokens", tokens, 0), whole("batch", batch), whole("tp", tp)
        encoding = codecs.codec(codec)
        ideal = allocated = read = tables = 0
        for layer, layout in self._layouts(page_size):
            live = layer.record_bytes(layout.live(tokens), encoding, tp)
            read += live
            if layer.shares_with is None:
                ideal += live
                allocated += layer.record_bytes(layout.slots(tokens), encoding, tp)
                tables += layout.table_bytes(tokens)
        return CacheBytes(ideal * batch, allocated * batch, read * batch, 0, tables * batch)

    def bytes_per_token(
        self, codec: str | CodecSpec = "bf16", *, at: int | None = None, tp: int = 1
    ) -> int:
        """Bytes that one more token of one sequence adds.

        Args:
            codec: name or spec of the codec.
            at: tokens held already; None for an empty cache, where every layer grows. A layer
                whose window is full adds nothing.
            tp: as in `cache_bytes`.
        """
        at = 0 if at is None else whole("at", at, 0)
        before = self.cache_bytes(at, codec=codec, tp=tp)
        return self.cache_bytes(at + 1, codec=codec, tp=tp).ideal - before.ideal

    def tokens_that_fit(
        self,
        budget_bytes: float,
        batch: int = 1,
        codec: str | CodecSpec = "bf16",
        *,
        page_size: int | None = None,
        tp: int = 1,
        definition: str = "kvjax",
    ) -> float:
        """The largest T whose `cache_bytes(T, ...).allocated` is at most `budget_bytes`.

        Returns:
            An int; math.inf where every length fits: a window in every layer, or no limit.
        """
        if not budget_bytes >= 0:
            raise ValueError(f"budget_bytes: got {budget_bytes!r}; accepted: 0 or more")
        if budget_bytes == math.inf:
            return math.inf

        def allocated(tokens: int) -> int:
            return self.cache_bytes(
                tokens, batch, codec, page_size=page_size, tp=tp, definition=definition
            ).allocated

        # From here on a cache that does not grow when its length doubles never grows again.
        settled = max([page_size or 1, *(layer.window or 1 for layer in self.layers)])
        too_long = 1
        while allocated(too_long) <= budget_bytes:
            if too_long >= settled and allocated(2 * too_long) == allocated(too_long):
                return math.inf
            too_long *= 2
        fits = 0
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if allocated(middle) <= budget_bytes:
                fits = middle
            else:
                too_long = middle
        return fits

    def intensity(self, codec: str | CodecSpec = "bf16", *, at: int | None = None) -> float:
        """FLOP/B of decode attention: products of the new token over cache bytes read.

        The batch cancels. With all layers alike this is 2 N / (K * itemsize): the group size N/K
        at two bytes.

        Args:
            codec: name or spec of the codec.
            at: tokens held, the newest included; None while no window is full.
        """
        at = 1 if at is None else whole("at", at)
        return self._attention_flop(at) / self.cache_bytes(at, codec=codec).read_per_step

    def decode_floor(
        self,
        chip: str | Chip,
        tokens: int,
        batch: int = 1,
        *,
        weight_bytes: float | None = None,
        codec: str | CodecSpec = "bf16",
        weight_codec: str | CodecSpec = "bf16",
    ) -> DecodeFloor:
        """The least seconds of a step that decodes one token for each of `batch` sequences.

        Counted are one read of the weights and of the cache, two FLOP a weight and sequence, and
        attention's products, all in bf16; activations and launches are not.

        Args:
            chip: a name in `CHIPS`, or a Chip.
            tokens: tokens each sequence holds, the newest included.
            batch: B.
            weight_bytes: bytes of the weights that a step reads; None to take `parameters_read`.
            codec: codec of the cache.
            weight_codec: how weights are stored; tells how many there are in `weight_bytes`.
        """
        read = self.cache_bytes(tokens, batch, codec).read_per_step
        weight_size = codecs.codec(weight_codec).itemsize
        if weight_bytes is None:
            weight_bytes = self.parameters_read * weight_size
        if not weight_bytes >= 0:
            raise ValueError(f"weight_bytes: got {weight_bytes!r}; accepted: 0 or more")
        flop = 2 * batch * weight_bytes / weight_size + batch * self._attention_flop(tokens)
        return decode_floor(chips.chip(chip), weight_bytes + read, flop)

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention projections of all layers, without biases."""
        return sum(layer.attention_parameters(self.d_model) for layer in self.layers)

    @property
    def parameters(self) -> int:
        """All parameters; tied ones once.

        Raises:
            ValueError: the spec does not know them (`weights` is None).
        """
        return self.attention_parameters + self._known_weights.total

    @property
    def parameters_read(self) -> int:
        """Parameters that a decode step reads: all but the tables of which it takes single rows."""
        return self.parameters - self._known_weights.lookup

    def layer_counts(self) -> list[tuple[LayerSpec, int]]:
        """The different layers, in order of appearance, and how many there are of each."""
        return list(Counter(self.layers).items())

    @property
    def _known_weights(self) -> Weights:
        if self.weights is None:
            raise ValueError(
                "weights: the spec has none, so parameters cannot be counted (a config gives them "
                "by its feed-forward width and vocab_size); give weight_bytes where it is accepted"
            )
        return self.weights

    def _layouts(self, page_size: int | None) -> Iterator[tuple[LayerSpec, LayoutSpec]]:
        """Each layer with the layout that holds it: a ring for a window, else dense or paged."""
        for index, layer in enumerate(self.layers):
            if page_size is None:
                yield layer, Dense() if layer.window is None else Ring(layer.window)
            elif layer.window is None:
                yield layer, Paged(whole("page_size", page_size))
            else:
                raise ValueError(
                    f"page_size: got {page_size!r}, but layer {index} has a window of "
                    f"{layer.window}; accepted: None (pages hold layers without a window)"
                )

    def _attention_flop(self, tokens: int) -> int:
        """FLOP of one sequence's decode attention over all layers."""
        return sum(layer.decode_flop(layout.live(tokens)) for layer, layout in self._layouts(None))

    def _check_sharing(self, index: int, layer: LayerSpec) -> None:
        if layer.shares_with is None:
            return
        producer = whole(f"layers[{index}].shares_with", layer.shares_with, 0)
        if producer >= len(self.layers) or self.layers[producer].shares_with is not None:
            raise ValueError(
                f"layers[{index}].shares_with: got {producer}; accepted: the index of one of the "
                f"{len(self.layers)} layers that keeps its own records"
            )
        kept = self.layers[producer]
        for name in ("kv_heads", "key_dim", "value_dim", "window"):
            if getattr(layer, name) != getattr(kept, name):
                raise ValueError(
                    f"layers[{index}].{name}: got {getattr(layer, name)}; accepted: "
                    f"{getattr(kept, name)}, as in layer {producer} whose records it reads"
                )
