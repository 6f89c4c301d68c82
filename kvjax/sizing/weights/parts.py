"""The parts of a decoder layer, each of which counts its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvjax.sizing.checks import whole
from kvjax.sizing.config import Count, Fields, Flag, Otherwise
from kvjax.sizing.weights.figures import Weights, ffn_parameters

if TYPE_CHECKING:
    from kvjax.sizing.layer import LayerSpec
    from kvjax.sizing.spec import ModelSpec


class UnknownSizeError(Exception):
    """The config lacks a size that parameters depend on."""


@dataclass(frozen=True)
class Site:
    """Where a part stands.

    Attributes:
        fields: the config's fields, as the layer sees them.
        spec: the model, without its weights.
        layer: the layer, or the first of those that make up the decoder layer.
        index: that of the decoder layer.
        depth: decoder layers.
        defaults: sizes that the family's class takes where a nested config lacks them.
    """

    fields: Fields
    spec: ModelSpec
    layer: LayerSpec
    index: int
    depth: int
    defaults: Mapping[str, int]

    @property
    def d_model(self) -> int:
        """D."""
        return self.spec.d_model

    def size(self, size: Size) -> int:
        """The number that a rule of a size gives here; of a list, this layer's.

        Raises:
            UnknownSizeError: the config lacks it, and its family takes nothing in its stead.
        """
        if isinstance(size, int):
            return size
        if callable(size):
            return size(self)
        rule = Count(size) if isinstance(size, str) else size
        names = (rule.name, *rule.also)
        given = next((name for name in names if self.fields.has(name)), None)
        if given is not None and isinstance(self.fields.get(given), list):
            return whole(given, self.item(given))
        if given is not None:
            return self.fields.count(rule)
        present = any(self.fields.get(name, ...) is None for name in names)
        stand_in = rule.null if present else rule.absent
        if isinstance(stand_in, int):
            return stand_in
        if stand_in is Otherwise.REFUSED and self.fields.nested and rule.name in self.defaults:
            return self.defaults[rule.name]
        raise UnknownSizeError(rule.name)

    def number(self, name: str, absent: int = 0, least: int = 0) -> int:
        """A field of at least `least`; `absent` where the config lacks it or it is null."""
        if self.fields.nested and not self.fields.has(name):
            return self.defaults.get(name, absent)
        return self.fields.number(name, absent, least)

    def items(self, name: str) -> list[Any] | None:
        """A field that holds a list; None where it is absent or null."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, list):
            raise ValueError(f"{name}: got {value!r}; accepted: a list")
        return value

    def item(self, name: str) -> Any:
        """This decoder layer's item of a field that lists one for each; None without the list."""
        items = self.items(name)
        if items is not None and len(items) < self.depth:
            raise ValueError(
                f"{name}: got {len(items)} items; accepted: one for each of {self.depth} layers"
            )
        return None if items is None else items[self.index]


# A size: a number, the field that holds it, or a function of where it is asked for.
type Size = int | str | Count | Callable[[Site], int]
type Part = Callable[[Site], Weights]
type Switch = bool | Flag

D_FF = "intermediate_size"
ATTENTION_BIAS = Flag("attention_bias", False)
MLP_BIAS = Flag("mlp_bias", False)


def if_number(name: str, absent: int = 0) -> Size:
    """A field that may be 0, absent or null."""
    return lambda site: site.number(name, absent)


def or_zero(name: str) -> Size:
    """A field that may be 0 and may not be absent."""

    def size(site: Site) -> int:
        return site.number(name) if site.fields.has(name) else site.size(name)

    return size


def or_times(name: str, factor: int = 4) -> Size:
    """A field, or `factor` D where it is absent or null."""
    return lambda site: site.number(name) or factor * site.d_model


def small(size: Size) -> Part:
    """As many parameters, among the small ones."""
    return lambda site: Weights(small=site.size(size))


def when(flag: Switch, part: Part) -> Part:
    """The part where a field says so."""
    return lambda site: part(site) if site.fields.flag(flag) else Weights()


def dense(width: Size = D_FF, matrices: int = 3, bias: Switch = False) -> Part:
    """A dense feed-forward layer.

    Args:
        width: its inner width.
        matrices: 3 for a gated one, 2 for a plain one.
        bias: whether its matrices have biases.
    """

    def part(site: Site) -> Weights:
        d_ff = site.size(width)
        biases = (matrices - 1) * d_ff + site.d_model if site.fields.flag(bias) else 0
        return Weights(ffn=ffn_parameters(site.d_model, d_ff, matrices), small=biases)

    return part


def biases(qkv: Switch = False, o: Switch = False) -> Part:
    """Biases of the projections of K and V that the layer makes itself, and of q and o."""

    def part(site: Site) -> Weights:
        layer = site.layer
        own = layer.kv_heads * (layer.key_dim + layer.value_dim)
        kept = 0 if layer.shares_with is not None else own
        return Weights(
            small=site.fields.flag(qkv) * (layer.query_heads * layer.key_dim + kept)
            + site.fields.flag(o) * site.d_model
        )

    return part


def head_norms(site: Site) -> Weights:
    """One scale of H for the queries of all heads, and one for the keys that the layer makes."""
    keys = site.layer.shares_with is None
    return Weights(small=(1 + keys) * site.layer.key_dim)


def width_norms(site: Site) -> Weights:
    """Scales for the queries and keys of all heads."""
    return Weights(small=(site.layer.query_heads + site.layer.kv_heads) * site.layer.key_dim)


def sinks(site: Site) -> Weights:
    """One learned logit a query head (GPT-OSS)."""
    return Weights(small=site.layer.query_heads)


def output_gate(bias: Switch = False) -> Part:
    """A gate for each number that the heads put out."""

    def part(site: Site) -> Weights:
        width = site.layer.query_heads * site.layer.value_dim
        return Weights(mixers=site.d_model * width, small=width * site.fields.flag(bias))

    return part


def head_gate(site: Site) -> Weights:
    """A gate for each head."""
    return Weights(mixers=site.d_model * site.layer.query_heads)


def norms(count: Size, bias: Switch = False) -> Part:
    """Norms of D, with biases or without."""
    return lambda site: Weights(
        small=site.size(count) * site.d_model * (1 + site.fields.flag(bias))
    )
