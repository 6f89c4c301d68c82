"""Sharing across layers: which layers make keys and values, and which read those of another.

A map is data: for each layer the index of its producer, the layer whose keys and values it reads;
a layer that makes its own is its own producer. Any map will do in which producers come first, not
only those of the functions here. A shared layer has queries of its own and nothing in the cache, so
that a cache has as many bytes as its producers need; what a decode step reads of it stays the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from kvjax.nn.attention import AttentionConfig
from kvjax.nn.latent import LatentAttentionConfig
from kvjax.nn.tensor_product import TensorProductAttentionConfig
from kvjax.nn.tied import TiedAttentionConfig

type AnyAttentionConfig = (
    AttentionConfig | LatentAttentionConfig | TiedAttentionConfig | TensorProductAttentionConfig
)

# What must be equal for one layer to read the keys of another: keys are rotated once, by their
# producer.
_ALIKE = ("d_model", "kv_heads", "key_dim", "value_dim", "rope")


def cla(layers: int, factor: int) -> tuple[int, ...]:
    """Cross-layer attention: the first of every `factor` layers produces (arXiv:2405.12981).

    Where `factor` does not divide `layers`, the last group is smaller; it has its own producer.

    Raises:
      ValueError: fewer than 1 of either.
    """
    _at_least_1("layers", layers)
    _at_least_1("factor", factor)
    return tuple(i - i % factor for i in range(layers))


def yoco(layers: int) -> tuple[int, ...]:
    """You only cache once: one layer in the middle produces for all above it (arXiv:2405.05254).

    The layers below, which the paper gives a short window, make their own. Keys and values come
    from the producer's input by the same norm as its queries; the paper gives them one of theirs.

    Raises:
      ValueError: fewer than 1 layer.
    """
    _at_least_1("layers", layers)
    return tuple(min(i, layers // 2) for i in range(layers))


def last_layers(kinds: Sequence[Hashable], shared: int) -> tuple[int, ...]:
    """The last `shared` layers read the last layer of their kind before them (Gemma 3n).

    Args:
      kinds: of each layer, such as its window.
      shared: how many share, 0 to all but one.

    Raises:
      ValueError: for another number, or one with which a layer finds none of its kind.
    """
    if not 0 <= shared < len(kinds):
        raise ValueError(f"shared: got {shared}; accepted: 0 to {len(kinds) - 1}, of these layers")
    own = len(kinds) - shared
    last = {kind: i for i, kind in enumerate(kinds[:own])}
    for i, kind in enumerate(kinds):
        if kind not in last:
            raise ValueError(
                f"shared: got {shared}, with which layer {i} finds none of its kind ({kind!r}) "
                f"among the first {own}; accepted: fewer"
            )
    return (*range(own), *(last[kind] for kind in kinds[own:]))


def share(
    attention: Sequence[AttentionConfig], producers: Sequence[int]
) -> tuple[AttentionConfig, ...]:
    """The layers, each reading the keys and values of its producer.

    Args:
      attention: settings of each layer.
      producers: a map; the index of each layer's producer.

    Raises:
      ValueError: for a map of another length, or one that the layers do not allow, or layers
        that keep something else than keys and values.
    """
    if len(producers) != len(attention):
        raise ValueError(
            f"producers: got {len(producers)}; accepted: {len(attention)}, one for each layer"
        )
    for i, layer in enumerate(attention):
        if not isinstance(layer, AttentionConfig):
            raise ValueError(
                f"attention[{i}]: got {type(layer).__name__}; accepted: AttentionConfig, whose "
                f"keys and values others can read"
            )
    layers = tuple(
        replace(layer, shares_with=None if producer == i else producer)
        for i, (layer, producer) in enumerate(zip(attention, producers, strict=True))
    )
    check_sharing(layers)
    return layers


def producers_of(attention: Sequence[AnyAttentionConfig]) -> tuple[int, ...]:
    """The map of these layers."""
    return tuple(
        i if layer.shares_with is None else layer.shares_with for i, layer in enumerate(attention)
    )


def span_of_readers(attention: Sequence[AnyAttentionConfig], producer: int) -> int | None:
    """The most keys that a query of any layer with that producer sees; None for all."""
    spans = [
        layer.span
        for layer, source in zip(attention, producers_of(attention), strict=True)
        if source == producer
    ]
    return None if None in spans else max(span for span in spans if span is not None)


def check_sharing(attention: Sequence[AnyAttentionConfig]) -> None:
    """Raise ValueError for a layer that cannot read the keys and values that it is to share."""
    for i, layer in enumerate(attention):
        producer = layer.shares_with
        if producer is None:
            continue
        where = f"attention[{i}].shares_with: got {producer}"
        if not 0 <= producer < i:
            raise ValueError(
                f"{where}; accepted: the index of an earlier layer (one that reads a later layer, "
                f"as in arXiv:2405.10637, needs its keys before they are made)"
            )
        made = attention[producer]
        if not isinstance(made, AttentionConfig):
            raise ValueError(
                f"{where}, a layer of {type(made).__name__}; accepted: one of AttentionConfig"
            )
        if made.shares_with is not None:
            raise ValueError(
                f"{where}, which shares itself; accepted: a layer that makes its own keys and "
                f"values, such as {made.shares_with}"
            )
        for name in _ALIKE:
            if getattr(layer, name) != getattr(made, name):
                raise ValueError(
                    f"attention[{i}].{name}: got {getattr(layer, name)}; accepted: "
                    f"{getattr(made, name)}, as in layer {producer}, whose keys and values it reads"
                )


def _at_least_1(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}: got {value}; accepted: 1 and more")
