"""What fits into a budget of bytes: the inverse of `ModelSpec.cache_bytes`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

from kvjax.sizing import codecs
from kvjax.sizing.checks import amount, is_amount, whole
from kvjax.sizing.codecs import CodecSpec
from kvjax.sizing.placement import Batch, Placement, Placing

if TYPE_CHECKING:
    from kvjax.sizing.spec import ModelSpec


def tokens_that_fit(
    spec: ModelSpec,
    budget_bytes: float,
    batch: Batch,
    codec: str | CodecSpec,
    **placing: Unpack[Placing],
) -> float:
    """See `ModelSpec.tokens_that_fit`."""
    amount("budget_bytes", budget_bytes)

    def allocated(tokens: int) -> int:
        return spec.cache_bytes(tokens, batch, codec, **placing).allocated

    if allocated(0) > budget_bytes:
        raise ValueError(
            f"budget_bytes: got {budget_bytes}; accepted: at least {allocated(0)}, which the cache "
            "takes before the first token (of a source, or of a learned prompt)"
        )
    if budget_bytes == math.inf:
        return math.inf
    settled = _settled(spec, batch, codecs.codec(codec), Placement(**placing))
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


def sequences_that_fit(
    spec: ModelSpec,
    budget_bytes: float,
    tokens: int | Mapping[int, float],
    codec: str | CodecSpec,
    **placing: Unpack[Placing],
) -> float:
    """See `ModelSpec.sequences_that_fit`."""
    amount("budget_bytes", budget_bytes)
    mix = tokens if isinstance(tokens, Mapping) else {whole("tokens", tokens, 0): 1}
    if not is_mix(mix.values()):
        raise ValueError(f"tokens: got {mix!r}; accepted: weights of 0 or more, not all 0")
    replica: Placing = {**placing, "dp": 1}
    # What the first sequence costs beyond the second is kept once: scales of whole tensors.
    one, two = (
        sum(
            weight * spec.cache_bytes(length, batch, codec, **replica).total
            for length, weight in mix.items()
        )
        / sum(mix.values())
        for batch in (1, 2)
    )
    each, once = two - one, 2 * one - two
    if budget_bytes == math.inf or one == 0:
        return math.inf
    if each == 0:
        return math.inf if budget_bytes >= once else 0
    return max(math.floor((budget_bytes - once) / each), 0) * Placement(**placing).dp


def is_mix(weights: Collection[float]) -> bool:
    """Whether they are finite weights of which not all are 0."""
    return all(is_amount(weight) for weight in weights) and 0 < sum(weights) < math.inf


def _settled(spec: ModelSpec, batch: Batch, codec: CodecSpec, placement: Placement) -> int:
    """A length from which a cache that does not grow when it doubles never grows again."""
    spans = max((layer.span or 0 for layer in spec.layers), default=0)
    ratios = max((pool.ratio for layer in spec.layers for pool in layer.pools), default=1)
    page = (placement.page_size or 1) * ratios
    ring = spans + placement.in_flight + placement.ring_multiple
    shares = batch if isinstance(batch, Sequence) else (1,)
    length = ring + 2 * page + codec.tokens_kept_exact + codec.tokens_sharing
    return math.ceil(length / min((share for share in shares if share), default=1))
