"""Families with short convolutions: as layers of their own, or within layers that attend."""

from collections.abc import Mapping
from dataclasses import replace

from kvjax.sizing.config import Count, Fields
from kvjax.sizing.families.family import (
    FULL,
    KV_HEADS,
    SLIDING,
    Family,
    Kinds,
    LayerRule,
    Reader,
    Shape,
    checked_depth,
    every,
    full,
    sizes,
    sliding,
)
from kvjax.sizing.families.hybrid_kinds import (
    ATTENTION_FIELDS,
    CONV,
    HYBRID,
    HYBRID_SLIDING,
    listed,
)
from kvjax.sizing.families.kinds import every_nth, layer_types
from kvjax.sizing.layer import LayerSpec, state_layer
from kvjax.sizing.states import State

_K8 = replace(KV_HEADS, absent=8)


def _short_conv(kernel: int) -> LayerRule:
    """LFM 2: a convolution over D channels; `kernel` is taken where the config lacks its width."""

    def rule(fields: Fields, shape: Shape) -> LayerSpec:
        width = fields.count(Count("conv_L_cache", absent=kernel))
        return state_layer(State("conv", shape.d_model * width, shards=shape.d_model))

    return rule


def _refused(fields: Fields, depth: int) -> tuple[str, ...]:
    raise ValueError(
        f"layer_types: absent; accepted for {fields.model_type}: {CONV} or {FULL} for each of "
        f"{depth} layers"
    )


def _lfm3_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """Full attention and a window in turn on the even layers after the first."""
    return tuple(
        FULL if index % 4 == 2 else SLIDING if index % 4 == 0 and index else CONV
        for index in range(depth)
    )


# --- Inkling: convolutions over K, V and the outputs of attention and feed-forward, in f32

_HYBRIDS = (HYBRID, HYBRID_SLIDING)
_KERNEL = Count("conv_kernel_size", absent=4, also=("sconv_kernel_size",))
_ONE_IN_SIX = every_nth(6, HYBRID_SLIDING, HYBRID)


def _with_convolutions(fields: Fields, shape: Shape, layer: LayerSpec) -> LayerSpec:
    kernel, heads = fields.count(_KERNEL), layer.kv_heads
    states = (
        State("conv", heads * layer.key_dim * kernel, shards=heads, itemsize=4),
        State("conv", heads * layer.value_dim * kernel, shards=heads, itemsize=4),
        # Of the outputs, which all shards have in full.
        State("conv", 2 * shape.d_model * kernel, itemsize=4),
    )
    return replace(layer, states=states)


def _inkling_full(fields: Fields, shape: Shape) -> LayerSpec:
    return _with_convolutions(fields, shape, full(fields, shape))


def _inkling_window(query_heads: int, kv_heads: int, window: int) -> LayerRule:
    """A layer with a window, whose heads have fields of their own.

    Args:
        query_heads, kv_heads, window: taken where the config lacks the fields.
    """

    def rule(fields: Fields, shape: Shape) -> LayerSpec:
        n, k, h = (
            fields.count(Count(name, absent=otherwise))
            for name, otherwise in (
                ("swa_num_attention_heads", query_heads),
                ("swa_num_key_value_heads", kv_heads),
                ("swa_head_dim", 128),
            )
        )
        width = Count("sliding_window_size", absent=window, also=("sliding_window",))
        layer = LayerSpec(n, k, h, h, window=fields.count(width))
        return _with_convolutions(fields, shape, layer)

    return rule


def _inkling(
    width: int, depth: int, query_heads: int, kv_heads: int, window: int, kinds: Kinds
) -> Family:
    """A family of Inkling's, by its class's defaults; `kv_heads` is that of windowed layers."""
    return Family(
        sizes(width, depth, query_heads),
        kv_heads=Count("num_key_value_heads", absent=8),
        head_dim=Count("head_dim", absent=128),
        kinds=kinds,
        layers={
            HYBRID: _inkling_full,
            HYBRID_SLIDING: _inkling_window(query_heads, kv_heads, window),
        },
        ignores=ATTENTION_FIELDS
        | {"swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim"}
        | {"sliding_window", "sliding_window_size", "num_nextn_predict_layers"},
    )


def _looped(once: Kinds) -> Kinds:
    """The layers, and those of the loop once more for each further pass, as they are cached."""

    def read(fields: Fields, depth: int) -> tuple[str, ...]:
        loop = Fields(fields.part("loop_config") or {}, f"{fields.model_type}'s loop_config")
        start, end, passes = (
            loop.number(nested, fields.number(flat, otherwise))
            for nested, flat, otherwise in (
                ("core_start", "loop_layer_index_start", 6),
                ("core_end", "loop_layer_index_end", 18),
                ("num_passes", "loop_num_passes", 3),
            )
        )
        if passes < 1:
            raise ValueError(f"loop_num_passes: got {passes}; accepted: at least 1")
        kinds = once(fields, depth)
        loops = kinds[start:end]
        checked_depth("loop_num_passes", max(len(loops), 1) * passes)
        return kinds + loops * (passes - 1)

    return read


# --- Zaya: queries and keys pass through two convolutions, half of each value is a token late


def _zaya(attention: LayerRule) -> LayerRule:
    """Compressed convolutional attention (Zyphra 2025) over the records of `attention`."""

    def rule(fields: Fields, shape: Shape) -> LayerSpec:
        layer = attention(fields, shape)
        assert isinstance(layer, LayerSpec)
        inputs = sum(fields.count(Count(f"cca_time{part}", absent=2)) - 1 for part in (0, 1))
        k, width = layer.kv_heads, (layer.query_heads + layer.kv_heads) * layer.key_dim
        conv = (State("conv", width * inputs, shards=k),) if inputs else ()
        late = State("recurrent", k * layer.value_dim // 2, shards=k)
        return replace(layer, states=(*conv, late))

    return rule


FAMILIES: Mapping[str, Reader] = {
    "lfm2": Family(
        sizes(2560, 32, 32),
        kv_heads=_K8,
        kinds=layer_types(listed("full_attn_idxs", FULL, CONV, every(FULL)), FULL, CONV),
        layers={FULL: full, CONV: _short_conv(3)},
        ignores=ATTENTION_FIELDS | {"full_attn_idxs", "num_heads"},
    ),
    "lfm2_moe": Family(
        sizes(2048, 32, 32),
        kv_heads=_K8,
        kinds=layer_types(listed("full_attn_idxs", FULL, CONV, _refused), FULL, CONV),
        layers={FULL: full, CONV: _short_conv(3)},
        ignores=ATTENTION_FIELDS | {"full_attn_idxs", "num_heads"},
    ),
    "lfm3": Family(
        sizes(2048, 24, 16),
        kv_heads=Count("num_key_value_heads", absent=4),
        head_dim=Count("head_dim", absent=128),
        kinds=layer_types(_lfm3_kinds, FULL, SLIDING, CONV),
        layers={FULL: full, SLIDING: sliding(absent=256), CONV: _short_conv(7)},
        ignores=ATTENTION_FIELDS | {"sliding_window"},
    ),
    "inkling_text": _inkling(
        6144,
        66,
        64,
        16,
        512,
        layer_types(listed("local_layer_ids", HYBRID_SLIDING, HYBRID, _ONE_IN_SIX), *_HYBRIDS),
    ),
    "inkling2_text": _inkling(4608, 48, 48, 8, 1024, layer_types(_ONE_IN_SIX, *_HYBRIDS)),
    "inkling2_loop_text": _inkling(
        2304, 24, 24, 8, 1024, _looped(layer_types(_ONE_IN_SIX, *_HYBRIDS))
    ),
    "zaya": Family(
        sizes(2048, 40, 8),
        kv_heads=Count("num_key_value_heads", absent=2),
        head_dim=Count("head_dim", absent=128),
        kinds=layer_types(every(HYBRID), *_HYBRIDS),
        layers={HYBRID: _zaya(full), HYBRID_SLIDING: _zaya(sliding())},
        ignores=ATTENTION_FIELDS | {"sliding_window"},
    ),
}
