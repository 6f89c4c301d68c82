"""Families whose layers differ in more than their window: in heads, widths, or by chunks."""

from dataclasses import replace

from kvjax.sizing.config import Count, Fields
from kvjax.sizing.families.family import (
    CHUNKED,
    FULL,
    SLIDING,
    Family,
    Reader,
    Shape,
    chunked,
    every,
    full,
    sizes,
)
from kvjax.sizing.families.kinds import full_where, layer_types, rotating
from kvjax.sizing.families.rows import fixed_head_dim, fixed_kv_heads, head_dim, kv_heads, windowed
from kvjax.sizing.layer import LayerSpec


def _chunks_with_rope(fields: Fields, depth: int) -> tuple[str, ...]:
    """Llama-4: the layers that rotate attend within chunks."""
    common = FULL if fields.get("attention_chunk_size", 8192) is None else CHUNKED
    return tuple(common if rotates else FULL for rotates in rotating(fields, depth))


def _local(fields: Fields, depth: int) -> tuple[str, ...]:
    """ModernBERT's decoder: every n-th layer from the first on sees all keys."""
    step = fields.number("global_attn_every_n_layers", 3, 1)
    return full_where(lambda index, _: index % step == 0)(fields, depth)


def _half_window(fields: Fields, shape: Shape) -> LayerSpec:
    """ModernBERT's decoder: W is half of `local_attention`, which counts both sides."""
    n, k, h = shape.heads(fields)
    if fields.has("sliding_window"):
        return LayerSpec(n, k, h, h, window=fields.count(Count("sliding_window")))
    both = fields.count(Count("local_attention", absent=128))
    return LayerSpec(n, k, h, h, window=both // 2)


def _mimo_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """MiMo-V2-Flash: the first layer and every sixth see all keys."""
    kinds = full_where(lambda index, _: index == 0 or (index + 1) % 6 == 0)(fields, depth)
    published = fields.get("hybrid_layer_pattern")
    if published is not None and published != [int(kind == SLIDING) for kind in kinds]:
        raise ValueError(
            f"hybrid_layer_pattern: got {published!r}; accepted: 0 for the first layer and every "
            "sixth and 1 for the others, or layer_types"
        )
    return kinds


def _mimo_window(fields: Fields) -> int:
    """MiMo-V2-Flash: the published field does not count the query's own key."""
    if fields.has("sliding_window_size"):
        return fields.count(Count("sliding_window_size")) + 1
    return fields.count(Count("sliding_window", absent=129))


def _mimo_full(fields: Fields, shape: Shape) -> LayerSpec:
    n, k, h = shape.heads(fields)
    return LayerSpec(n, k, h, fields.count(Count("v_head_dim", absent=128)))


def _mimo_sliding(fields: Fields, shape: Shape) -> LayerSpec:
    """MiMo-V2-Flash: twice the KV heads in a window."""
    layer = _mimo_full(fields, shape)
    return replace(layer, kv_heads=2 * layer.kv_heads, window=_mimo_window(fields))


def _query_heads_listed(fields: Fields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Laguna: a list may give each layer query heads of its own."""
    heads = fields.get("num_attention_heads_per_layer")
    if heads is None:
        return layers
    if not isinstance(heads, list) or len(heads) != len(layers):
        raise ValueError(
            f"num_attention_heads_per_layer: got {heads!r}; accepted: one for each of "
            f"{len(layers)} layers"
        )
    return tuple(replace(layer, query_heads=n) for layer, n in zip(layers, heads, strict=True))


def _step_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """Step-3.5: the list may go on with the layers that predict tokens beyond the next."""
    extra = fields.number("num_nextn_predict_layers", 0)
    given = fields.get("layer_types")
    listed = depth + extra if isinstance(given, list) and len(given) != depth else depth
    return layer_types(every(FULL))(fields, listed)[:depth]


def _step_query_heads(fields: Fields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Step-3.5: layers with a window may have more query heads."""
    if fields.has("per_layer_config"):
        return layers
    heads = fields.get("num_sliding_attention_heads")
    if heads is None:
        heads = (fields.part("attention_other_setting") or {}).get("num_attention_heads")
    if heads is None:
        return layers
    return tuple(
        layer if layer.window is None else replace(layer, query_heads=heads) for layer in layers
    )


# MiMo-V2-Flash spells out for its windows what its class derives.
_MIMO_STRAY = frozenset(
    {
        "attention_chunk_size",
        "num_nextn_predict_layers",
        "sliding_window",
        "sliding_window_size",
        "swa_head_dim",
        "swa_num_attention_heads",
        "swa_num_key_value_heads",
    }
)

FAMILIES: dict[str, Reader] = {
    "laguna": replace(
        windowed(
            sizes(2048, 40, 48),
            fixed_kv_heads(8),
            fixed_head_dim(128),
            kinds=layer_types(every(FULL)),
            window=512,
        ),
        sharing=_query_heads_listed,
    ),
    "llama4_text": Family(
        sizes(5120, 48, 40),
        kv_heads(8),
        head_dim(128),
        kinds=layer_types(_chunks_with_rope, FULL, CHUNKED),
        layers={FULL: full, CHUNKED: chunked(absent=8192)},
        ignores=frozenset({"attention_chunk_size"}),
    ),
    "mimo_v2_flash": Family(
        sizes(4096, 48, 64),
        fixed_kv_heads(4),
        fixed_head_dim(192),
        kinds=layer_types(_mimo_kinds),
        layers={FULL: _mimo_full, SLIDING: _mimo_sliding},
        ignores=_MIMO_STRAY,
    ),
    "modernbert-decoder": Family(
        sizes(768, 22, 12),
        kv_heads=None,
        head_dim=None,
        kinds=layer_types(_local),
        layers={FULL: full, SLIDING: _half_window},
        ignores=frozenset({"sliding_window"}),
    ),
    "step3p5": replace(
        windowed(
            sizes(4096, 45, 64),
            Count("num_key_value_heads", absent=8, also=("num_attention_groups",)),
            fixed_head_dim(128),
            kinds=_step_kinds,
            ignores=frozenset({"num_sliding_attention_heads"}),
        ),
        sharing=_step_query_heads,
    ),
}
