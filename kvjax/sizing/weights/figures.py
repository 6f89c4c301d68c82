"""How many parameters a model has beside its attention projections, and which a step reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Experts:
    """The routed experts of layers that are alike.

    Attributes:
        count: E, experts of one layer.
        per_token: k, experts that one token is sent to.
        each: parameters of one expert.
        layers: layers that have such experts.
        choices: what the router picks from: E, and more where some choices compute nothing.
    """

    count: int
    per_token: int
    each: int
    layers: int = 1
    choices: int | None = None

    @property
    def total(self) -> int:
        """Parameters of all experts."""
        return self.layers * self.count * self.each

    def read(self, batch: int) -> float:
        """Expected parameters of the experts that one step of `batch` tokens needs.

        Tokens are taken to choose independently and evenly, so that an expert is needed by none of
        them with probability (1 - k/E)^batch. Real routers favour some experts, which needs fewer.
        """
        chosen = self.per_token / (self.choices or self.count)
        return self.total * (1 - (1 - chosen) ** batch)

    @property
    def active(self) -> float:
        """Parameters that one token is multiplied with, in expectation."""
        return self.read(1)


@dataclass(frozen=True)
class Weights:
    """Parameters of a model beside its attention projections, over all layers.

    Attributes:
        ffn: matrices of the dense feed-forward layers.
        head: the output head; the token table itself where the two are tied.
        lookup: tables of which a step takes single rows: positions, and untied tokens.
        small: norms, biases, routers and scales.
        shared: experts that every token passes.
        mixers: Mamba, linear-attention and convolution layers, and what attention has beside its
            projections: gates, indexers, compressors.
        encoder: an encoder's, of which a step that decodes reads none.
        experts: routed experts, of which a step reads those that its tokens are sent to.
        projections: the attention projections, which `total` leaves out, in models whose layers'
            kinds do not tell them; None where `LayerSpec.attention_parameters` does.
    """

    ffn: int = 0
    head: int = 0
    lookup: int = 0
    small: int = 0
    shared: int = 0
    mixers: int = 0
    encoder: int = 0
    experts: tuple[Experts, ...] = ()
    projections: int | None = None

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            self.ffn + other.ffn,
            self.head + other.head,
            self.lookup + other.lookup,
            self.small + other.small,
            self.shared + other.shared,
            self.mixers + other.mixers,
            self.encoder + other.encoder,
            _merged((*self.experts, *other.experts)),
            _sum(self.projections, other.projections),
        )

    @property
    def routed(self) -> int:
        """All routed experts."""
        return sum(experts.total for experts in self.experts)

    def routed_read(self, batch: int) -> float:
        """The routed experts that a step of `batch` tokens is expected to need."""
        return sum(experts.read(batch) for experts in self.experts)

    @property
    def total(self) -> int:
        """All of them."""
        return self._always + self.encoder + self.lookup + self.routed

    @property
    def active(self) -> int:
        """Those that one token is multiplied with."""
        return self.read(1)

    def read(self, batch: int = 1) -> int:
        """Those that a decode step of `batch` tokens reads: all but table rows and idle experts.

        The routed experts are counted as `Experts.read` expects them, rounded to a whole number.
        """
        return self._always + round(self.routed_read(batch))

    @property
    def _always(self) -> int:
        return self.ffn + self.head + self.small + self.shared + self.mixers


def _merged(experts: Iterable[Experts]) -> tuple[Experts, ...]:
    """Equal layers counted together."""
    layers: dict[Experts, int] = {}
    for group in experts:
        alike = replace(group, layers=1)
        layers[alike] = layers.get(alike, 0) + group.layers
    return tuple(replace(alike, layers=count) for alike, count in layers.items())


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else one + other


def ffn_parameters(d_model: int, d_ff: int, matrices: int = 3) -> int:
    """Parameters of one feed-forward layer without biases.

    Args:
        d_model: D.
        d_ff: its inner width.
        matrices: 3 for a gated one (SwiGLU, GeGLU), 2 for a plain one.
    """
    return matrices * d_model * d_ff
