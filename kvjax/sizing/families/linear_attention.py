"""States of linear attentions: delta rules, lightning attention and gated recurrences.

As in transformers, a convolution keeps its last inputs, one more than it needs, in the activations'
dtype, and a delta rule keeps its state in f32.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvjax.sizing.config import Count, Fields
from kvjax.sizing.families.family import Shape
from kvjax.sizing.layer import LayerSpec, state_layer
from kvjax.sizing.states import State

_KERNEL = Count("linear_conv_kernel_dim", absent=4)


def delta_states(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int
) -> tuple[State, ...]:
    """States of a delta rule: a key_dim × value_dim matrix a value head, and its convolution's.

    The convolution runs over queries and keys, whose heads are the key heads, and over values.
    """
    return (
        State("conv", 2 * key_heads * key_dim * kernel, shards=key_heads),
        State("conv", value_heads * value_dim * kernel, shards=value_heads),
        State("recurrent", value_heads * key_dim * value_dim, shards=value_heads, itemsize=4),
    )


@dataclass(frozen=True)
class GatedDelta:
    """A gated delta net (Yang et al. 2025), by the usual names of its fields.

    Attributes are what the family's class takes where the config lacks the field.
    """

    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128

    def __call__(self, fields: Fields, shape: Shape) -> LayerSpec:
        """A layer that keeps the states and nothing else."""
        key_heads = fields.count(Count("linear_num_key_heads", absent=self.key_heads))
        value_heads = fields.count(Count("linear_num_value_heads", absent=self.value_heads))
        if value_heads % key_heads:
            raise ValueError(
                f"linear_num_value_heads: got {value_heads} with linear_num_key_heads "
                f"{key_heads}; accepted: a multiple of linear_num_key_heads"
            )
        return state_layer(
            *delta_states(
                key_heads,
                value_heads,
                fields.count(Count("linear_key_head_dim", absent=self.key_dim)),
                fields.count(Count("linear_value_head_dim", absent=self.value_dim)),
                fields.count(_KERNEL),
            )
        )


def olmo_delta(fields: Fields, shape: Shape) -> LayerSpec:
    """OLMo Hybrid's gated delta net: N heads, keys 3/4 as wide as the model, values twice that."""

    def size(name: str, derived: int) -> int:
        return fields.count(Count(name, absent=derived, null=derived))

    n = shape.query_heads(fields)
    key_heads = size("linear_num_key_heads", n)
    key_dim = size("linear_key_head_dim", 3 * shape.d_model // (4 * key_heads))
    value_dim = size("linear_value_head_dim", 2 * key_dim)
    value_heads = size("linear_num_value_heads", n)
    return state_layer(
        *delta_states(key_heads, value_heads, key_dim, value_dim, fields.count(_KERNEL))
    )


@dataclass(frozen=True)
class Kda:
    """Kimi delta attention (Kimi Team 2025): as many key heads as value heads, one width.

    Published configs hold its sizes in `linear_attn_config`, transformers' in fields of their own.

    Attributes:
        heads, head_dim: taken where the config has neither.
    """

    heads: int
    head_dim: int = 128

    def __call__(self, fields: Fields, shape: Shape) -> LayerSpec:
        """A layer that keeps the states and nothing else."""
        return state_layer(*self.states(fields))

    def states(self, fields: Fields) -> tuple[State, ...]:
        """The states of one layer."""
        own = linear_config(fields)
        heads, width, kernel = (
            own.count(Count(name, absent=fields.count(Count(flat, absent=otherwise))))
            for name, flat, otherwise in (
                ("num_heads", "linear_num_heads", self.heads),
                ("head_dim", "linear_head_dim", self.head_dim),
                ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
            )
        )
        return delta_states(heads, heads, width, width, kernel)


def linear_config(fields: Fields) -> Fields:
    """The fields of `linear_attn_config`, none where the config lacks it."""
    part: Mapping = fields.part("linear_attn_config") or {}
    return Fields(part, f"{fields.model_type}'s linear_attn_config")


def bailing_kda(fields: Fields, shape: Shape) -> LayerSpec:
    """Bailing Hybrid's KDA: N heads as wide as `head_dim`, which saved configs give to others.

    Configs that transformers saves hold the rope width in `head_dim` and this one's width and
    heads in fields of their own.
    """
    n, width = shape.query_heads(fields), fields.count(Count("head_dim", absent=128))
    heads = fields.count(Count("linear_num_heads", absent=n))
    width = fields.count(Count("linear_head_dim", absent=width))
    kernel = fields.count(Count("short_conv_kernel_size", absent=4))
    kernel = fields.count(Count("linear_conv_kernel_dim", absent=kernel))
    return state_layer(*delta_states(heads, heads, width, width, kernel))


def lightning(fields: Fields, shape: Shape) -> LayerSpec:
    """Lightning attention (MiniMax 2025): a square matrix for each of N heads, never in f32."""
    n, h = shape.query_heads(fields), shape.head_dim(fields)
    return state_layer(State("recurrent", n * h * h, shards=n))


def rg_lru(fields: Fields, shape: Shape) -> LayerSpec:
    """RG-LRU (De et al. 2024): one number a channel, after a convolution.

    transformers keeps both in its modules, beside the cache, and without the spare input.
    """
    width = fields.count(Count("lru_width", absent=shape.d_model, null=shape.d_model))
    kernel = fields.count(Count("conv1d_width", absent=4))
    conv = (State("conv", width * (kernel - 1), shards=width),) if kernel > 1 else ()
    recurrent = State("recurrent", width, shards=width, itemsize=4)
    return state_layer(*conv, recurrent)


def rwkv(fields: Fields, shape: Shape) -> LayerSpec:
    """RWKV-4 (Peng et al. 2023): two last inputs; numerator, denominator and maximum in f32."""
    d = shape.d_model
    width = fields.count(Count("attention_hidden_size", absent=d, null=d))
    return state_layer(
        State("shift", 2 * d), State("recurrent", 3 * width, shards=width, itemsize=4)
    )


def mlstm(fields: Fields, shape: Shape) -> LayerSpec:
    """mLSTM (Beck et al. 2024): a matrix, a vector and a maximum a head.

    Keys and values are `qk_dim_factor` and `v_dim_factor` times as wide as the model, in steps
    of 64.
    """
    heads = fields.count(Count("num_heads", absent=8))
    key, value = (
        _in_steps(fields, name, shape.d_model, otherwise) // heads
        for name, otherwise in (("qk_dim_factor", 0.5), ("v_dim_factor", 1.0))
    )
    return state_layer(
        State("recurrent", heads * key * value, shards=heads),
        State("normalizer", heads * key, shards=heads),
        State("maximum", heads, shards=heads),
    )


def _in_steps(fields: Fields, name: str, d_model: int, otherwise: float, step: int = 64) -> int:
    return int((fields.factor(name, otherwise) * d_model + step - 1) // step * step)
