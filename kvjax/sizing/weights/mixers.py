"""Mamba, linear-attention and convolution layers.

The sizes of a mixer are taken from the states that its layer keeps, so that they are read from the
config in one place.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kvjax.sizing.config import Flag
from kvjax.sizing.states import State
from kvjax.sizing.weights.figures import Weights
from kvjax.sizing.weights.parts import Part, Site, Switch


def _named(site: Site, name: str) -> list[State]:
    return [state for state in site.layer.states if state.name == name]


def mamba(
    rank: str,
    conv_bias: Switch,
    bias: Switch,
    *,
    norms: bool = False,
) -> Part:
    """Mamba (Gu & Dao 2023).

    Args:
        rank: the field of the rank of the time step's projection; "auto" is D / 16, rounded up.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections in and out have biases.
        norms: whether time step, B and C have norms with scales (Jamba).
    """

    def part(site: Site) -> Weights:
        (conv,), (recurrent,) = _named(site, "conv"), _named(site, "recurrent")
        d_model, inner = site.d_model, conv.shards
        kernel, size = conv.elements // inner, recurrent.elements // inner
        given = site.fields.get(rank, "auto")
        steps = -(-d_model // 16) if given == "auto" else site.size(rank)
        projections = 3 * d_model * inner + inner * (steps + 2 * size) + steps * inner
        vectors = inner * (size + 2) + (steps + 2 * size) * norms
        biases = (2 * inner + d_model) * site.fields.flag(bias)
        conv_biases = inner * site.fields.flag(conv_bias)
        return Weights(mixers=projections + inner * kernel, small=vectors + biases + conv_biases)

    return part


def mamba2(conv_bias: Switch, bias: Switch, out_bias: Switch, norm: Switch = True) -> Part:
    """Mamba 2 (Dao & Gu 2024).

    Args:
        conv_bias: whether the convolution has a bias.
        bias: whether the projection in has one.
        out_bias: whether the projection out has one.
        norm: whether the gated norm has scales, one a channel.
    """

    def part(site: Site) -> Weights:
        channels, shared = _named(site, "conv")
        (recurrent,) = _named(site, "recurrent")
        heads, groups = channels.shards, shared.shards
        # inner * kernel, 2 * groups * size * kernel and inner * size give the kernel.
        kernel = math.isqrt(
            channels.elements * shared.elements // (2 * groups * recurrent.elements)
        )
        inner, widened = channels.elements // kernel, shared.elements // kernel
        d_model, flag = site.d_model, site.fields.flag
        convolved, into = inner + widened, 2 * inner + widened + heads
        biases = convolved * flag(conv_bias) + into * flag(bias) + d_model * flag(out_bias)
        return Weights(
            mixers=d_model * (into + inner) + convolved * kernel,
            small=3 * heads + inner * flag(norm) + biases,
        )

    return part


class Delta(NamedTuple):
    """Sizes of a delta rule: heads of keys and values, their widths and the convolution's."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @classmethod
    def of(cls, site: Site) -> Delta:
        """From the layer's states."""
        keys, values = _named(site, "conv")[:2]
        (recurrent,) = _named(site, "recurrent")
        key_heads, value_heads = keys.shards, values.shards
        wide_keys, wide_values = keys.elements // (2 * key_heads), values.elements // value_heads
        kernel = math.isqrt(wide_keys * wide_values * value_heads // recurrent.elements)
        return cls(key_heads, value_heads, wide_keys // kernel, wide_values // kernel, kernel)

    @property
    def keys(self) -> int:
        """Width of the keys of all heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of the values of all heads."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


def gated_delta(site: Site) -> Weights:
    """A gated delta net (Yang et al. 2025): q, k, v, an output gate, a decay and a step a head."""
    sizes = Delta.of(site)
    widths = sizes.convolved + 2 * sizes.values + 2 * sizes.value_heads
    return Weights(
        mixers=site.d_model * widths + sizes.convolved * sizes.kernel,
        small=2 * sizes.value_heads + sizes.value_dim,
    )


def kda(site: Site) -> Weights:
    """Kimi delta attention (Kimi Team 2025): decays a channel and output gate by low rank."""
    sizes = Delta.of(site)
    width, heads, head_dim = sizes.values, sizes.value_heads, sizes.value_dim
    low_rank = head_dim * (site.d_model + width)
    return Weights(
        mixers=site.d_model * (4 * width + heads) + 2 * low_rank + 3 * width * sizes.kernel,
        small=width + heads + head_dim,
    )


def bailing_kda(site: Site) -> Weights:
    """Bailing Hybrid's KDA, whose decays and output gate have full matrices."""
    sizes = Delta.of(site)
    width, heads = sizes.values, sizes.value_heads
    return Weights(
        mixers=site.d_model * (6 * width + heads) + 3 * width * sizes.kernel,
        small=width + heads + sizes.value_dim,
    )


def lightning(site: Site) -> Weights:
    """Lightning attention (MiniMax 2025): q, k, v, output gate, output, and a norm."""
    (state,) = _named(site, "recurrent")
    width = state.shards * math.isqrt(state.elements // state.shards)
    return Weights(mixers=5 * site.d_model * width, small=width)


def short_convolution(bias: Flag) -> Part:
    """LFM2's gated convolution: three inputs, a kernel a channel, and an output."""

    def part(site: Site) -> Weights:
        (conv,) = _named(site, "conv")
        biases = 5 * site.d_model * site.fields.flag(bias)
        return Weights(mixers=4 * site.d_model**2 + conv.elements, small=biases)

    return part
