"""What a family is: names of fields, their stand-ins, the kinds of its layers and their rules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvjax.sizing.config import Count, Fields, Otherwise
from kvjax.sizing.layer import LayerSpec
from kvjax.sizing.spec import ModelSpec

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR = "linear_attention"

DERIVED = Otherwise.DERIVED
KV_HEADS = Count("num_key_value_heads", absent=DERIVED, null=DERIVED)
HEAD_DIM = Count("head_dim", absent=DERIVED, null=DERIVED)


class Reader(Protocol):
    """Reads the cache of one family's models."""

    def read(self, fields: Fields) -> ModelSpec:
        """The model that the config describes.

        Raises:
            ValueError: names the field, what was given and what is accepted.
        """
        ...


@dataclass(frozen=True)
class Sizes:
    """The fields of D, of the number of layers and of N."""

    width: Count
    depth: Count
    query_heads: Count


def sizes(
    width: int,
    depth: int,
    query_heads: int,
    names: tuple[str, str, str] = ("hidden_size", "num_hidden_layers", "num_attention_heads"),
) -> Sizes:
    """The three size fields, with what the family's class takes where a nested config lacks one.

    Args:
        width, depth, query_heads: the class's defaults.
        names: the fields; their usual names are accepted beside them, as by transformers.
    """
    usual = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    return Sizes(
        *(
            Count(name, also=(common,) if name != common else (), nested=default)
            for name, common, default in zip(names, usual, (width, depth, query_heads), strict=True)
        )
    )


GPT_NAMES = ("n_embd", "n_layer", "n_head")

_MOST_LAYERS = 100_000


def checked_depth(name: str, depth: int) -> int:
    """Return the number of layers that a field gives if a model can have as many.

    Raises:
        ValueError: names the field; no tuple of so many layers is ever made.
    """
    if depth > _MOST_LAYERS:
        raise ValueError(f"{name}: got {depth} layers; accepted: at most {_MOST_LAYERS:,}")
    return depth


@dataclass(frozen=True)
class Shape:
    """The sizes that a family's layer rules share."""

    family: "Family"
    d_model: int
    depth: int

    def heads(self, fields: Fields) -> tuple[int, int, int]:
        """N, K and H."""
        return self.query_heads(fields), self.kv_heads(fields), self.head_dim(fields)

    def query_heads(self, fields: Fields) -> int:
        """N."""
        return fields.count(self.family.sizes.query_heads)

    def kv_heads(self, fields: Fields) -> int:
        """K; N where the family has no field for it."""
        rule, query_heads = self.family.kv_heads, self.query_heads(fields)
        if rule is None:
            return query_heads
        kv_heads = fields.count(rule, derived=lambda: query_heads)
        if query_heads % kv_heads:
            name = self.family.sizes.query_heads.name
            raise ValueError(
                f"{rule.name}: got {kv_heads} with {name} {query_heads}; "
                f"accepted: a divisor of {name}"
            )
        return kv_heads

    def head_dim(self, fields: Fields) -> int:
        """H; D / N where the family has no field for it, or none is given."""
        if self.family.head_dim is None:
            return self.share_of_width(fields)
        return fields.count(self.family.head_dim, derived=lambda: self.share_of_width(fields))

    def share_of_width(self, fields: Fields) -> int:
        """D / N."""
        query_heads = self.query_heads(fields)
        if self.d_model % query_heads:
            name, width = self.family.sizes.query_heads.name, self.family.sizes.width.name
            raise ValueError(
                f"{name}: got {query_heads} with {width} {self.d_model} and no head_dim; "
                f"accepted: a divisor of {width}"
            )
        return self.d_model // query_heads


# The kind of each layer, from the fields and the depth.
type Kinds = Callable[[Fields, int], tuple[str, ...]]
# What a layer of one kind keeps; several where a decoder layer has several attentions.
type LayerRule = Callable[[Fields, Shape], LayerSpec | tuple[LayerSpec, ...]]
# Which layers read the records of which, decided once all are known.
type Sharing = Callable[[Fields, tuple[LayerSpec, ...]], tuple[LayerSpec, ...]]


def full(fields: Fields, shape: Shape) -> LayerSpec:
    """Attention to all keys."""
    n, k, h = shape.heads(fields)
    return LayerSpec(n, k, h, h)


def sliding(name: str = "sliding_window", absent: int | None = None) -> LayerRule:
    """Attention to the last keys.

    Args:
        name: the field of W.
        absent: W where the config lacks it; None refuses that.
    """
    window = Count(name) if absent is None else Count(name, absent=absent)

    def rule(fields: Fields, shape: Shape) -> LayerSpec:
        n, k, h = shape.heads(fields)
        return LayerSpec(n, k, h, h, window=fields.count(window))

    return rule


def chunked(name: str = "attention_chunk_size", absent: int | None = None) -> LayerRule:
    """Attention within chunks (Llama 4)."""
    chunk = Count(name) if absent is None else Count(name, absent=absent)

    def rule(fields: Fields, shape: Shape) -> LayerSpec:
        n, k, h = shape.heads(fields)
        return LayerSpec(n, k, h, h, chunk=fields.count(chunk))

    return rule


def every(kind: str) -> Kinds:
    """All layers of one kind."""
    return lambda fields, depth: (kind,) * depth


def own_records(fields: Fields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """No layer reads another's records."""
    return layers


ALL_FULL = every(FULL)
PLAIN: Mapping[str, LayerRule] = {FULL: full}


@dataclass(frozen=True)
class Family:
    """A decoder whose config has one field for each size.

    Attributes:
        sizes: the fields of D, of the number of layers and of N.
        kv_heads: the field of K; None where the family has none, so that K = N.
        head_dim: the field of H; None where the family has none, so that H = D / N.
        kinds: the kind of each layer.
        layers: what a layer of each kind keeps.
        sharing: which layers read the records of which.
        ignores: cache-shaped fields that the family is published with and that change no cache.
    """

    sizes: Sizes
    kv_heads: Count | None = KV_HEADS
    head_dim: Count | None = HEAD_DIM
    kinds: Kinds = ALL_FULL
    layers: Mapping[str, LayerRule] = field(default_factory=lambda: PLAIN)
    sharing: Sharing = own_records
    ignores: frozenset[str] = frozenset()

    def read(self, fields: Fields) -> ModelSpec:
        """The model that the config describes."""
        fields.ignore(self.ignores)
        width, depth = fields.count(self.sizes.width), fields.count(self.sizes.depth)
        shape = Shape(self, width, checked_depth(self.sizes.depth.name, depth))
        layers: list[LayerSpec] = []
        for index, kind in enumerate(self.kinds(fields, shape.depth)):
            layer = self.layers[kind](fields.layer(index), shape)
            layers.extend(layer if isinstance(layer, tuple) else (layer,))
        shared = self.sharing(fields, tuple(layers))
        fields.refuse_unread()
        return ModelSpec(fields.model_type, shape.d_model, shared)
