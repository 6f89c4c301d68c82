"""States of state space models: Mamba (Gu & Dao 2023) and Mamba 2 (Dao & Gu 2024).

A convolution keeps its last inputs, one more than it needs, as transformers keeps them; the
recurrence keeps its state in f32.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvjax.sizing.checks import whole
from kvjax.sizing.config import Count, Fields
from kvjax.sizing.families.family import LayerRule, Shape
from kvjax.sizing.layer import LayerSpec, state_layer
from kvjax.sizing.states import State

# The states of one layer.
type StateRule = Callable[[Fields, Shape], tuple[State, ...]]


@dataclass(frozen=True)
class Mamba:
    """A Mamba layer: `inner` channels, each with its own recurrence.

    Attributes:
        expand: the field of inner / D.
        state: the field of the numbers that each channel keeps.
        kernel: the field of the convolution's width.
        inner: the field of the channels that goes before `expand`, if any.
    """

    expand: Count
    state: Count
    kernel: Count
    inner: Count | None = None

    def __call__(self, fields: Fields, shape: Shape) -> tuple[State, ...]:
        """States of `inner` channels, which tensor parallelism spreads one by one."""
        inner = fields.count(self.expand) * shape.d_model
        if self.inner is not None:
            expanded = inner
            inner = fields.count(self.inner, derived=lambda: expanded)
        return (
            State("conv", inner * fields.count(self.kernel), shards=inner),
            State("recurrent", inner * fields.count(self.state), shards=inner, itemsize=4),
        )


@dataclass(frozen=True)
class Mamba2:
    """A Mamba 2 layer: heads of H channels, and B and C shared by the heads of a group.

    The convolution runs over the heads' channels and over B and C of all groups, so that its
    state is spread over heads in one part and over groups in the other.

    Attributes:
        heads: the field of the number of heads.
        head_dim: the field of H; "auto" for `inner` / heads.
        groups: the field of the number of groups.
        state: the field of the numbers that each channel keeps.
        kernel: the field of the convolution's width.
        expand: the field of inner / D; None where heads * H need not be a multiple of D.
        inner: as `Mamba.inner`.
    """

    heads: Count
    head_dim: Count
    groups: Count
    state: Count
    kernel: Count
    expand: Count | None
    inner: Count | None = None

    def __call__(self, fields: Fields, shape: Shape) -> tuple[State, ...]:
        """States that tensor parallelism spreads over heads, those of B and C over groups."""
        heads, width = self._heads(fields, shape)
        groups, size = fields.count(self.groups), fields.count(self.state)
        if heads % groups:
            raise ValueError(
                f"{self.groups.name}: got {groups} with {self.heads.name} {heads}; "
                f"accepted: a divisor of {self.heads.name}"
            )
        kernel = fields.count(self.kernel)
        return (
            State("conv", heads * width * kernel, shards=heads),
            State("conv", 2 * groups * size * kernel, shards=groups),
            State("recurrent", heads * width * size, shards=heads, itemsize=4),
        )

    def _heads(self, fields: Fields, shape: Shape) -> tuple[int, int]:
        """The number of heads and H, of which one may follow from the other."""
        if self.expand is None:
            return fields.count(self.heads), fields.count(self.head_dim)
        inner = self._inner(fields, shape)
        given = fields.get(self.head_dim.name)
        if given in (None, "auto"):
            heads = fields.count(self.heads)
            width = inner // heads
        else:
            width = whole(self.head_dim.name, given)
            heads = fields.count(self.heads) if fields.has(self.heads.name) else inner // width
        if heads * width != inner:
            raise ValueError(
                f"{self.heads.name}: got {heads} with {self.head_dim.name} {width} for {inner} "
                f"channels; accepted: heads that divide the channels, {self.head_dim.name} wide"
            )
        return heads, width

    def _inner(self, fields: Fields, shape: Shape) -> int:
        assert self.expand is not None
        expand = fields.count(self.expand)
        if self.inner is None:
            return expand * shape.d_model
        return fields.count(self.inner, derived=lambda: expand * shape.d_model)


def only(states: StateRule) -> LayerRule:
    """A layer that keeps nothing but these states."""
    return lambda fields, shape: state_layer(*states(fields, shape))


def beside(attention: LayerRule, states: StateRule) -> LayerRule:
    """A layer that attends and keeps these states as well."""

    def rule(fields: Fields, shape: Shape) -> LayerSpec:
        layer = attention(fields, shape)
        assert isinstance(layer, LayerSpec)
        return replace(layer, states=states(fields, shape))

    return rule


def nothing(fields: Fields, shape: Shape) -> LayerSpec:
    """A feed-forward layer, which keeps nothing."""
    return state_layer()
