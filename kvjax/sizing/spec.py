"""A model's cache as data, and the arithmetic over its layers."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Unpack

from kvjax.sizing import capacity, chips, codecs
from kvjax.sizing.account import CacheBytes, LayerAccount
from kvjax.sizing.checks import whole
from kvjax.sizing.codecs import CodecSpec
from kvjax.sizing.layer import LayerSpec
from kvjax.sizing.placement import Batch, Placement, Placing, sequence_lengths, stages
from kvjax.sizing.roofline import Chip, DecodeFloor, decode_floor
from kvjax.sizing.step import step_work
from kvjax.sizing.weights import Precision, Weights, precisions


@dataclass(frozen=True)
class ModelSpec:
    """The cache of a model: a `LayerSpec` for each attention or state that it keeps.

    Attributes:
        model_type: the family, as config.json spells it.
        d_model: D.
        layers: in the model's order. A decoder layer that attends to a source as well has two, and
            so has one with two attentions.
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
        batch: Batch = 1,
        codec: str | CodecSpec = "bf16",
        **placing: Unpack[Placing],
    ) -> CacheBytes:
        """Bytes of the cache of `batch` sequences that fill `tokens` tokens each, on one device.

        Args:
            tokens: length, and capacity, of every sequence; 0 or more.
            batch: B; or, for a mix of lengths, what share of `tokens` each sequence has, such as
                (1, 0.5, 0.5), rounded down to whole tokens.
            codec: name or spec of the codec.
            page_size: P, slots a page, of a paged cache; None for one run of slots a sequence.
            tp: shards that heads are spread over, and repeated on where there are too few; latents,
                rope keys and index keys are on all of them.
            pp: stages that the layers are cut into; each figure is that of its largest stage.
            dp: replicas that the sequences are dealt out to; the figures are of the fullest.
            source_tokens: tokens of the source that cross-attention layers attend to.
            in_flight: tokens that one step writes before it attends; a window keeps room for them.
            ring_multiple: slots of a window are rounded up to a multiple of it.
            kept: what was left by an eviction that every layer has been through but for windows.
            definition: whose `allocated` and `state` are given: this library's ("kvjax"), or those
                of transformers' DynamicCache ("hf-dynamic") or StaticCache ("hf-static").

        Raises:
            ValueError: names the argument, what was given and what is accepted.
        """
        placement = Placement(**placing)
        encoding, tokens = codecs.codec(codec), whole("tokens", tokens, 0)
        lengths = sequence_lengths(tokens, batch, placement.dp)
        costs = [
            self._stage_bytes(stage, lengths, encoding, placement)
            for stage in stages(len(self.layers), placement.pp)
        ]
        return CacheBytes(
            *(max(getattr(cost, f.name) for cost in costs) for f in fields(CacheBytes))
        )

    def bytes_per_token(
        self, codec: str | CodecSpec = "bf16", *, at: int | None = None, tp: int = 1, pp: int = 1
    ) -> int:
        """Bytes that one more token of one sequence adds.

        Args:
            codec: name or spec of the codec.
            at: tokens held already, of which a full window adds nothing and a pool only once in
                its ratio; None for the average while no window is full, rounded up.
            tp, pp: as in `cache_bytes`.
        """
        if at is not None:
            tokens = whole("at", at, 0)
            before, after = (
                self.cache_bytes(n, 1, codec, tp=tp, pp=pp).allocated for n in (tokens, tokens + 1)
            )
            return after - before
        encoding, shards = codecs.codec(codec), whole("tp", tp)
        added = [
            0 if layer.shares_with is not None else layer.per_token(encoding, shards)
            for layer in self.layers
        ]
        cuts = stages(len(self.layers), whole("pp", pp))
        return math.ceil(max(sum(added[index] for index in stage) for stage in cuts))

    def tokens_that_fit(
        self,
        budget_bytes: float,
        batch: Batch = 1,
        codec: str | CodecSpec = "bf16",
        **placing: Unpack[Placing],
    ) -> float:
        """The largest T whose `cache_bytes(T, ...).allocated` is at most `budget_bytes`.

        Returns:
            An int; math.inf where every length fits: a window in every layer, or no limit.

        Raises:
            ValueError: not even an empty cache fits (cross-attention to a source, a learned
                prompt), or an argument is none of those accepted.
        """
        return capacity.tokens_that_fit(self, budget_bytes, batch, codec, **placing)

    def sequences_that_fit(
        self,
        budget_bytes: float,
        tokens: int | Mapping[int, float],
        codec: str | CodecSpec = "bf16",
        **placing: Unpack[Placing],
    ) -> float:
        """How many sequences' allocated slots, states and tables fit, over all `dp` replicas.

        Scales that a layer keeps once are counted with every sequence.

        Args:
            budget_bytes: of one device; 0 or more.
            tokens: the length of every sequence; or a distribution, from length to weight, of
                which the mean cost counts.
            codec, placing: as in `cache_bytes`.

        Returns:
            An int; math.inf where a sequence costs nothing.
        """
        return capacity.sequences_that_fit(self, budget_bytes, tokens, codec, **placing)

    def intensity(self, codec: str | CodecSpec = "bf16", *, at: int | None = None) -> float:
        """FLOP/B of decode attention: products of the new token over cache bytes read.

        The batch cancels. With K and V in all layers alike this is 2 N / (K * itemsize), the group
        size N/K at two bytes; a latent decoded absorbed has N (2 L + R) / (L + R) at two bytes.

        Args:
            codec: name or spec of the codec.
            at: tokens held, the newest included; None while no window is full.

        Raises:
            ValueError: no layer attends.
        """
        if at is not None:
            tokens = whole("at", at)
            flop, read = self.attention_flop(tokens), self.cache_bytes(tokens, 1, codec)
            nbytes: float = read.read_per_step
        else:
            encoding = codecs.codec(codec)
            growing = [layer for layer in self.layers if not layer.cross]
            nbytes = float(sum(layer.per_token(encoding) for layer in growing))
            flop = sum(layer.decode_flop(1) for layer in growing)
        if not nbytes:
            raise ValueError(f"intensity: {self.model_type} has no layer that attends")
        return flop / nbytes

    def decode_floor(
        self,
        chip: str | Chip,
        tokens: int,
        batch: int = 1,
        *,
        weight_bytes: float | None = None,
        codec: str | CodecSpec = "bf16",
        weight_codec: str | Precision = "bf16",
        products: str = "matrix",
        tp: int = 1,
        source_tokens: int = 0,
    ) -> DecodeFloor:
        """The least seconds of a step that decodes one token for each of `batch` sequences.

        Counted are one read of the weights, of the cache and of the states, which are written back
        as well; two FLOP a weight and sequence that it is multiplied with; attention's products;
        and softmax's own work and exponentials, one for each score. Products are in bf16 on the
        matrix units, in f32 outside them, whatever the codecs. Not counted are activations,
        launches, the work of an index or of a recurrence, and what shards send each other.

        Args:
            chip: a name in `CHIPS`, or a Chip.
            tokens: tokens each sequence holds, the newest included.
            batch: B.
            weight_bytes: bytes of the weights that a step reads, all of which every sequence is
                multiplied with; None to count them: of a mixture of experts those that `batch`
                tokens are expected to need are read, and each token multiplied with its own.
            codec: codec of the cache.
            weight_codec: how weights are stored, a name in `WEIGHT_PRECISIONS`; tells how many
                there are in `weight_bytes`.
            products: what computes attention's q·k and p·v: "matrix" units, or "vector" units.
            tp: shards; the floor is that of one of them, with the weights cut evenly and the cache
                and heads as in `cache_bytes`.
            source_tokens: tokens of the source that cross-attention layers attend to.

        Raises:
            ValueError: names the argument, what was given and what is accepted.
        """
        work = step_work(
            self,
            whole("tokens", tokens, 0),
            whole("batch", batch),
            weight_bytes=weight_bytes,
            codec=codecs.codec(codec),
            precision=precisions.precision(weight_codec),
            products=products,
            tp=whole("tp", tp),
            source_tokens=whole("source_tokens", source_tokens, 0),
        )
        return decode_floor(chips.chip(chip), work)

    def expanded(self) -> "ModelSpec":
        """The model with K and V of all N heads in each layer that keeps a latent.

        That is how MLA attends where it is not absorbed (DeepSeek-AI 2024, section 2.1.2): H and HV
        as in the layers, with the rope key repeated for every head. Index keys and windows stay. It
        is for its cache and products: its projections count as plain ones.
        """
        layers = (
            replace(
                layer,
                kind="attention",
                kv_heads=layer.query_heads,
                latent_rank=0,
                rope_dim=0,
                rope_heads=1,
                hf=None,
            )
            if layer.kind == "latent"
            else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention projections of all layers, without biases."""
        if self.weights is not None and self.weights.projections is not None:
            return self.weights.projections
        return sum(layer.attention_parameters(self.d_model) for layer in self.layers)

    @property
    def parameters(self) -> int:
        """All parameters; tied ones once.

        Raises:
            ValueError: the spec does not know them (`weights` is None).
        """
        return self.attention_parameters + self._known_weights.total

    @property
    def parameters_active(self) -> int:
        """Parameters that one token is multiplied with: of routed experts, those it is sent to."""
        return self.attention_parameters + self._known_weights.active

    def parameters_read(self, batch: int = 1) -> int:
        """Parameters that a step which decodes `batch` tokens reads.

        All but the tables of which it takes single rows, and the routed experts that it is not
        expected to need (`Experts.read`).
        """
        return self.attention_parameters + self._known_weights.read(whole("batch", batch))

    def weight_bytes(self, precision: str | Precision = "bf16") -> int:
        """Bytes of all weights, stored as a name in `WEIGHT_PRECISIONS` says."""
        known = self._known_weights
        stored = precisions.precision(precision)
        return stored.nbytes(
            known, self.attention_parameters, known.routed, known.lookup, known.encoder
        )

    def weight_bytes_read(self, batch: int = 1, precision: str | Precision = "bf16") -> int:
        """Bytes of the weights that a step which decodes `batch` tokens reads."""
        known, stored = self._known_weights, precisions.precision(precision)
        experts = known.routed_read(whole("batch", batch))
        return stored.nbytes(known, self.attention_parameters, experts, 0, 0)

    def layer_counts(self) -> list[tuple[LayerSpec, int]]:
        """The different layers, in order of appearance, and how many there are of each."""
        return list(Counter(self.layers).items())

    def attention_flop(self, tokens: int, source_tokens: int = 0, tp: int = 1) -> int:
        """FLOP of one sequence's decode attention over all layers: q·k and p·v, on one shard."""
        return sum(
            layer.attention_flop(_attended(layer, tokens, source_tokens), tp)
            for layer in self.layers
        )

    def scores(self, tokens: int, source_tokens: int = 0, tp: int = 1) -> int:
        """Scores of one sequence's decode attention over all layers, on one of `tp` shards."""
        return sum(
            layer.scores(_attended(layer, tokens, source_tokens), tp) for layer in self.layers
        )

    @property
    def _known_weights(self) -> Weights:
        if self.weights is None:
            raise ValueError(
                "weights: the spec has none, so parameters cannot be counted (a config gives them "
                "by its feed-forward width and vocab_size); give weight_bytes where it is accepted"
            )
        return self.weights

    def _stage_bytes(
        self, stage: range, lengths: Mapping[int, int], codec: CodecSpec, placement: Placement
    ) -> CacheBytes:
        """The layers of one stage, for sequences of `lengths` (length to count)."""
        totals = [0] * len(fields(CacheBytes))
        for layer, count in Counter(self.layers[index] for index in stage).items():
            for length, sequences in lengths.items():
                rows = _attended(layer, length, placement.source_tokens)
                cost = LayerAccount(layer, rows, codec, placement).bytes()
                for position, f in enumerate(fields(CacheBytes)):
                    totals[position] += count * sequences * getattr(cost, f.name)
            constants = LayerAccount(layer, 0, codec, placement).constants
            totals[-1] += count * constants
        return CacheBytes(*totals)

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
        for name in (
            *("kind", "kv_heads", "key_dim", "value_dim", "latent_rank", "rope_dim"),
            *("rope_heads", "window", "chunk"),
        ):
            if getattr(layer, name) != getattr(kept, name):
                raise ValueError(
                    f"layers[{index}].{name}: got {getattr(layer, name)}; accepted: "
                    f"{getattr(kept, name)}, as in layer {producer} whose records it reads"
                )


def _attended(layer: LayerSpec, tokens: int, source_tokens: int) -> int:
    """Records that the layer attends to: of the sequence and what precedes it, or of its source."""
    return source_tokens if layer.cross else tokens + layer.prompt
