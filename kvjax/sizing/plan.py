"""Which chips a model needs: how many, spread how, for a batch or a rate of tokens."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvjax.sizing import chips as known_chips
from kvjax.sizing.capacity import is_mix
from kvjax.sizing.checks import is_amount, whole
from kvjax.sizing.placement import Placing
from kvjax.sizing.roofline import Chip, DecodeFloor
from kvjax.sizing.spec import ModelSpec

# Beyond so many sequences the matrix units bind on every chip; a cache without a limit stops there.
_MOST_SEQUENCES = 2**16


@dataclass(frozen=True)
class Demand:
    """What is asked of the chips.

    Attributes:
        lengths: tokens that a sequence holds, with the share of the sequences that hold as many.
        batch: sequences decoded at once; None to meet `tokens_per_second`.
        tokens_per_second: of all sequences together; None to hold `batch`.
        codec: how the cache is stored.
        weights: how the weights are stored, a name in `WEIGHT_PRECISIONS`.
        page_size: slots a page of the cache.
        memory_share: of a chip's memory that weights and cache may take; the rest is for
            activations, communication and what the runtime keeps.
        source_tokens: tokens of the source that cross-attention layers attend to.
    """

    lengths: Mapping[int, float]
    batch: int | None = None
    tokens_per_second: float | None = None
    codec: str = "bf16"
    weights: str = "bf16"
    page_size: int | None = None
    memory_share: float = 0.9
    source_tokens: int = 0

    def __post_init__(self) -> None:
        if (self.batch is None) == (self.tokens_per_second is None):
            raise ValueError(
                f"batch: got {self.batch} with tokens_per_second {self.tokens_per_second}; "
                "accepted: one of the two"
            )
        if self.batch is not None:
            object.__setattr__(self, "batch", whole("batch", self.batch))
        rate = self.tokens_per_second
        if rate is not None and not (is_amount(rate) and 0 < rate < math.inf):
            raise ValueError(f"tokens_per_second: got {rate!r}; accepted: more than 0, finite")
        if not (is_amount(self.memory_share) and 0 < self.memory_share <= 1):
            raise ValueError(
                f"memory_share: got {self.memory_share!r}; accepted: more than 0, at most 1"
            )
        if not isinstance(self.lengths, Mapping) or not is_mix(self.lengths.values()):
            raise ValueError(
                f"lengths: got {self.lengths!r}; accepted: shares of 0 or more by length, not all 0"
            )
        for length in self.lengths:
            whole("tokens", length)
        whole("source_tokens", self.source_tokens, 0)


@dataclass(frozen=True)
class Spread:
    """Shards, stages and replicas of a model."""

    tp: int
    pp: int
    dp: int


@dataclass(frozen=True)
class Plan:
    """The fewest chips of one kind that meet a demand, or why there are none.

    Attributes:
        chip: its name.
        spread: how the model is spread over them; None where no number of chips will do.
        reason: why none will do; empty otherwise.
        weight_bytes, cache_bytes, usable_bytes: of one chip; the cache with its states and tables.
        batch: sequences decoded at once, over all replicas.
        largest_batch: as many as fit; math.inf where there is no limit.
        floor: of a decode step of one replica, without what the chips send each other.
        tokens_per_second: at most, over all replicas.
    """

    chip: str
    spread: Spread | None = None
    reason: str = ""
    weight_bytes: int = 0
    cache_bytes: int = 0
    usable_bytes: int = 0
    batch: int = 0
    largest_batch: float = 0
    floor: DecodeFloor | None = None
    tokens_per_second: float = 0.0

    @property
    def chips(self) -> int:
        """All chips; 0 where no number of them will do."""
        return 0 if self.spread is None else self.spread.tp * self.spread.pp * self.spread.dp

    def figures(self) -> dict[str, Any]:
        """Plain data, units in the names; a figure without a limit is None."""
        if self.spread is None or self.floor is None:
            return {"chip": self.chip, "fits": False, "reason": self.reason}
        return {
            "chip": self.chip,
            "fits": True,
            "chips": self.chips,
            **asdict(self.spread),
            "weight_bytes": self.weight_bytes,
            "cache_bytes": self.cache_bytes,
            "usable_bytes": self.usable_bytes,
            "batch": self.batch,
            "largest_batch": None if math.isinf(self.largest_batch) else self.largest_batch,
            "decode_floor_seconds": self.floor.seconds,
            "binds": self.floor.binds,
            "ceiling_seconds": dict(self.floor.ceilings),
            "tokens_per_second": self.tokens_per_second,
        }


def plan(
    spec: ModelSpec,
    demand: Demand,
    chips: Sequence[str | Chip] = tuple(known_chips.CHIPS),
    *,
    max_tp: int = 8,
    max_chips: int = 1024,
) -> list[Plan]:
    """The fewest chips of each kind that meet the demand; of equally many the fastest spread.

    Args:
        spec: the model.
        demand: what they must hold or do.
        chips: names in `CHIPS`, or chips.
        max_tp: the most shards; chips of one host, as a rule.
        max_chips: the most chips of one kind. Shards and stages are powers of two.

    Raises:
        ValueError: an argument is not one of those accepted, or the parameters are not known.
    """
    max_tp, max_chips = whole("max_tp", max_tp), whole("max_chips", max_chips)
    return [_fewest(spec, demand, known_chips.chip(chip), max_tp, max_chips) for chip in chips]


def batch_floors(
    spec: ModelSpec, demand: Demand, plans: Sequence[Plan]
) -> dict[str, list[dict[str, Any]]]:
    """The floor over the batch of one replica of each plan, by powers of two as far as they fit.

    Returns:
        For each plan that fits, named by its chips, rows of batch, floor_seconds and binds.
    """
    sweeps: dict[str, list[dict[str, Any]]] = {}
    for found in plans:
        if found.spread is None:
            continue
        chip, spread = known_chips.chip(found.chip), found.spread
        replica = _Replica(spec, demand, chip, spread.tp, spread.pp)
        rows = []
        for batch in _powers_of_two(int(min(replica.largest_batch(), _MOST_SEQUENCES))):
            floor = replica.floor(batch)
            rows.append({"batch": batch, "floor_seconds": floor.seconds, "binds": floor.binds})
        sweeps[f"{found.spread.tp * found.spread.pp} × {found.chip}"] = rows
    return sweeps


def _fewest(spec: ModelSpec, demand: Demand, chip: Chip, max_tp: int, max_chips: int) -> Plan:
    best, held = None, False
    for tp, pp in _shards_and_stages(max_tp, max_chips, len(spec.layers)):
        replica = _Replica(spec, demand, chip, tp, pp)
        held = held or replica.free_bytes >= 0
        option = replica.plan((best.chips if best else max_chips) // (tp * pp))
        if option is not None and (best is None or _better(option, best)):
            best = option
    lacks = "cache or rate" if held else "weights"
    return best or Plan(chip.name, reason=f"{max_chips} chips: too few for {lacks}")


def _better(option: Plan, than: Plan) -> bool:
    fewer = than.chips - option.chips
    return fewer > 0 or (fewer == 0 and option.tokens_per_second > than.tokens_per_second)


def _shards_and_stages(max_tp: int, max_chips: int, depth: int) -> Iterator[tuple[int, int]]:
    """The powers of two of both that no limit forbids."""
    for tp in _powers_of_two(min(max_tp, max_chips)):
        for pp in _powers_of_two(min(max_chips // tp, depth)):
            yield tp, pp


def _powers_of_two(most: int) -> Iterator[int]:
    return (2**power for power in range(most.bit_length()))


@dataclass(frozen=True)
class _Replica:
    """One copy of the model, spread over shards and stages of one kind of chip."""

    spec: ModelSpec
    demand: Demand
    chip: Chip
    tp: int
    pp: int

    @property
    def usable_bytes(self) -> int:
        return math.floor(self.chip.memory_bytes * self.demand.memory_share)

    @property
    def weight_bytes(self) -> int:
        """Of one chip: as if every tensor could be cut evenly."""
        return math.ceil(self.spec.weight_bytes(self.demand.weights) / (self.tp * self.pp))

    @property
    def free_bytes(self) -> int:
        return self.usable_bytes - self.weight_bytes

    def largest_batch(self) -> float:
        """Sequences that it can hold."""
        if self.free_bytes < 0:
            return 0
        return self.spec.sequences_that_fit(
            self.free_bytes, self.demand.lengths, self.demand.codec, **self._placing
        )

    def plan(self, max_replicas: int) -> Plan | None:
        """As few replicas as meet the demand; None where `max_replicas` do not."""
        if max_replicas == 0 or (most := self.largest_batch()) == 0:
            return None
        if self.demand.batch is not None:
            dp = 1 if math.isinf(most) else math.ceil(self.demand.batch / most)
            batch = math.ceil(self.demand.batch / dp)
        else:
            full = int(min(most, _MOST_SEQUENCES))
            dp = math.ceil(self._wanted_rate / self._rate(full))
            batch = self._smallest_batch(self._wanted_rate / dp, full)
        return self._figures(dp, batch, most) if dp <= max_replicas else None

    def floor(self, batch: int) -> DecodeFloor:
        """Of one step of `batch` sequences.

        The stages work on as many parts of the batch at once, and a step ends when each part has
        gone through all of them: it takes as long as the whole model does for one part. Each
        ceiling is linear in the cache, so that those of different lengths can be averaged.
        """
        total = sum(self.demand.lengths.values())
        ceilings: dict[str, float] = {}
        for length, share in self.demand.lengths.items():
            floor = self.spec.decode_floor(
                self.chip,
                length,
                math.ceil(batch / self.pp),
                codec=self.demand.codec,
                weight_codec=self.demand.weights,
                tp=self.tp,
                source_tokens=self.demand.source_tokens,
            )
            for name, seconds in floor.ceilings.items():
                ceilings[name] = ceilings.get(name, 0.0) + seconds * share / total
        return DecodeFloor(ceilings)

    def _rate(self, batch: int) -> float:
        return batch / self.floor(batch).seconds

    @property
    def _wanted_rate(self) -> float:
        assert self.demand.tokens_per_second is not None
        return self.demand.tokens_per_second

    def _smallest_batch(self, rate: float, full: int) -> int:
        """The fewest sequences that reach the rate, which `full` of them do."""
        low, high = 0, full
        while high - low > 1:  # the rate never falls with the batch
            middle = (low + high) // 2
            low, high = (low, middle) if self._rate(middle) >= rate else (middle, high)
        return high

    def _figures(self, dp: int, batch: int, most: float) -> Plan:
        floor, total = self.floor(batch), self.demand.batch or dp * batch
        cost = sum(
            share * self.spec.cache_bytes(length, batch, self.demand.codec, **self._placing).total
            for length, share in self.demand.lengths.items()
        ) / sum(self.demand.lengths.values())
        return Plan(
            self.chip.name,
            Spread(self.tp, self.pp, dp),
            weight_bytes=self.weight_bytes,
            cache_bytes=math.ceil(cost),
            usable_bytes=self.usable_bytes,
            batch=total,
            largest_batch=dp * most,
            floor=floor,
            tokens_per_second=total / floor.seconds,
        )

    @property
    def _placing(self) -> Placing:
        return {
            "page_size": self.demand.page_size,
            "tp": self.tp,
            "pp": self.pp,
            "source_tokens": self.demand.source_tokens,
        }
