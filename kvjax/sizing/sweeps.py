"""How the floor of a decode step moves with the batch and with the context.

A latent (MLA) is taken as decoded absorbed; give `spec.expanded()` for the other way.
"""

import math
from collections.abc import Iterable
from typing import NotRequired, TypedDict, Unpack

from kvjax.sizing import chips
from kvjax.sizing.checks import amount, is_amount, whole
from kvjax.sizing.codecs import CodecSpec
from kvjax.sizing.placement import Placing
from kvjax.sizing.roofline import Chip
from kvjax.sizing.spec import ModelSpec
from kvjax.sizing.weights import Precision


class Step(TypedDict):
    """Keyword arguments of `ModelSpec.decode_floor` that a sweep holds fixed."""

    weight_bytes: NotRequired[float | None]
    codec: NotRequired[str | CodecSpec]
    weight_codec: NotRequired[str | Precision]
    products: NotRequired[str]
    tp: NotRequired[int]
    source_tokens: NotRequired[int]


class Row(TypedDict):
    """One point of a sweep.

    Attributes:
        batch, tokens: sequences, and tokens that each holds.
        floor_seconds: of one step; `binds` names its ceiling.
        tokens_per_second: at most, over the batch.
        cache_bytes: that must be in memory on one shard: slots, states and tables.
    """

    batch: int
    tokens: int
    floor_seconds: float
    binds: str
    tokens_per_second: float
    cache_bytes: int


def batch_sweep(
    spec: ModelSpec, chip: str | Chip, tokens: int, batches: Iterable[int], **step: Unpack[Step]
) -> list[Row]:
    """The floor for each number of sequences of `tokens` tokens, whether or not they fit."""
    return [_row(spec, chip, tokens, batch, step) for batch in batches]


def context_sweep(
    spec: ModelSpec, chip: str | Chip, contexts: Iterable[int], batch: int = 1, **step: Unpack[Step]
) -> list[Row]:
    """The floor for each length of `batch` sequences, whether or not they fit."""
    return [_row(spec, chip, tokens, batch, step) for tokens in contexts]


def crossover_tokens(
    spec: ModelSpec,
    batch: int = 1,
    codec: str | CodecSpec = "bf16",
    *,
    weight_bytes: float | None = None,
    weight_codec: str | Precision = "bf16",
    **placing: Unpack[Placing],
) -> float:
    """The most tokens a sequence at which the cache does not outweigh the weights.

    Args:
        batch, codec, placing: as in `ModelSpec.cache_bytes`.
        weight_bytes: of all weights, of which each of `tp` x `pp` devices has as many; None to
            count the parameters.
        weight_codec: how weights are stored, a name in `WEIGHT_PRECISIONS`, where they are counted.

    Returns:
        An int; math.inf where the cache stops growing before it does.
    """
    weights = _share(_held_bytes(spec, weight_bytes, weight_codec), placing)
    return spec.tokens_that_fit(weights, batch, codec, **placing)


def batch_ceiling(
    spec: ModelSpec,
    chip: str | Chip,
    tokens: int,
    codec: str | CodecSpec = "bf16",
    *,
    weight_bytes: float | None = None,
    weight_codec: str | Precision = "bf16",
    memory_share: float = 1.0,
    **placing: Unpack[Placing],
) -> float:
    """The most sequences of `tokens` tokens whose caches fit beside the weights.

    Args:
        tokens, codec, placing: as in `ModelSpec.cache_bytes`.
        weight_bytes, weight_codec: as in `crossover_tokens`.
        memory_share: of the chip's memory that weights and cache may take.

    Returns:
        An int, 0 where the weights alone do not fit; math.inf where a sequence costs nothing.
    """
    if not (is_amount(memory_share) and 0 < memory_share <= 1):
        raise ValueError(f"memory_share: got {memory_share!r}; accepted: more than 0, at most 1")
    weights = _share(_held_bytes(spec, weight_bytes, weight_codec), placing)
    free = chips.chip(chip).memory_bytes * memory_share - weights
    if free < 0:
        return 0
    return spec.sequences_that_fit(free, whole("tokens", tokens, 0), codec, **placing)


def _row(spec: ModelSpec, chip: str | Chip, tokens: int, batch: int, step: Step) -> Row:
    floor = spec.decode_floor(chip, tokens, batch, **step)
    cache = spec.cache_bytes(
        tokens,
        batch,
        step.get("codec", "bf16"),
        tp=step.get("tp", 1),
        source_tokens=step.get("source_tokens", 0),
    )
    return Row(
        batch=batch,
        tokens=tokens,
        floor_seconds=floor.seconds,
        binds=floor.binds,
        tokens_per_second=batch / floor.seconds if floor.seconds else math.inf,
        cache_bytes=cache.total,
    )


def _held_bytes(spec: ModelSpec, nbytes: float | None, stored: str | Precision) -> float:
    """Bytes of all weights."""
    if nbytes is None:
        return spec.weight_bytes(stored)
    return amount("weight_bytes", nbytes)


def _share(weights: float, placing: Placing) -> float:
    """The bytes of one device, as if every tensor could be cut evenly."""
    return weights / (placing.get("tp", 1) * placing.get("pp", 1))
