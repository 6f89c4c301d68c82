"""Gemma from its second generation on: windows in a pattern, wider full layers, shared records."""

from collections.abc import Callable
from dataclasses import replace

from kvjax.sizing.config import Count, Fields, Flag
from kvjax.sizing.families.family import (
    FULL,
    SLIDING,
    Family,
    LayerRule,
    Reader,
    Shape,
    full,
    sizes,
    sliding,
)
from kvjax.sizing.families.kinds import alternating, every_nth, layer_types
from kvjax.sizing.layer import LayerSpec

# Gemma-2 is published with `sliding_window_size` beside the `sliding_window` that counts. Attention
# both ways, of which PaliGemma's configs tell, halves the windows of some families and no others'.
_DECLARED = frozenset(
    {
        "sliding_window",
        "sliding_window_pattern",
        "sliding_window_size",
        "use_bidirectional_attention",
    }
)


def _either_way(absent: int, bidirectional: Callable[[object], bool]) -> LayerRule:
    """A window of W keys, or of W // 2 + 1 on either side where attention is bidirectional.

    Args:
        absent: W where the config lacks it.
        bidirectional: whether a value of `use_bidirectional_attention` means that.
    """
    window = Count("sliding_window", absent=absent)

    def rule(fields: Fields, shape: Shape) -> LayerSpec:
        n, k, h = shape.heads(fields)
        width = fields.count(window)
        if bidirectional(fields.get("use_bidirectional_attention")):
            width = width // 2 + 1
        return LayerSpec(n, k, h, h, window=width)

    return rule


def _last_full(fields: Fields, depth: int) -> tuple[str, ...]:
    """Gemma-4: as `layer_types` says, or every sixth; the last one sees all keys in any case."""
    kinds = layer_types(every_nth(6))(fields, depth)
    return (*kinds[:-1], FULL)


def _wide(fields: Fields, shape: Shape) -> LayerSpec:
    """Gemma-4's full attention: heads of its own width and, with `attention_k_eq_v`, number.

    A config that was saved by transformers says so in `per_layer_config` instead.
    """
    layer = full(fields, shape)
    fields.ignore({"global_head_dim", "num_global_key_value_heads"})
    k_is_v = fields.flag(Flag("attention_k_eq_v", False))
    if fields.get("per_layer_config", ...) is not ...:
        return layer
    dim = fields.count(Count("global_head_dim", absent=512))
    kept = layer.kv_heads
    if k_is_v:
        kept = fields.count(Count("num_global_key_value_heads", absent=kept, null=kept))
    return LayerSpec(layer.query_heads, kept, dim, dim)


def last_layers_share(absent: int) -> Callable[..., tuple[LayerSpec, ...]]:
    """The last layers read the records of the last layer before them that sees as many keys.

    Args:
        absent: `num_kv_shared_layers` where the config lacks it.
    """

    def sharing(fields: Fields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
        shared, depth = fields.number("num_kv_shared_layers", absent), len(layers)
        if shared >= depth:
            raise ValueError(
                f"num_kv_shared_layers: got {shared} for {depth} layers; accepted: below {depth}"
            )
        own = depth - shared
        last = {layer.window: index for index, layer in enumerate(layers[:own])}
        missing = [index for index in range(own, depth) if layers[index].window not in last]
        if missing:
            raise ValueError(
                f"num_kv_shared_layers: got {shared}, with which layer {missing[0]} finds no layer "
                f"of its kind among the first {own}; accepted: fewer"
            )
        return layers[:own] + tuple(
            replace(layer, shares_with=last[layer.window]) for layer in layers[own:]
        )

    return sharing


_GEMMA2 = Family(
    sizes(2304, 26, 8),
    kv_heads=Count("num_key_value_heads", absent=4),
    head_dim=Count("head_dim", absent=256),
    kinds=layer_types(alternating(SLIDING, FULL)),
    layers={FULL: full, SLIDING: sliding(absent=4096)},
    ignores=_DECLARED,
)
_GEMMA3 = replace(
    _GEMMA2,
    kinds=layer_types(every_nth(6, name="sliding_window_pattern")),
    layers={FULL: full, SLIDING: _either_way(4096, bool)},
)


def _gemma4(window: int) -> Family:
    """Gemma-4; `window` is W where the config lacks it."""
    rule = _either_way(window, lambda value: value == "all")
    return Family(
        sizes(2304, 30, 8),
        kv_heads=Count("num_key_value_heads", absent=4),
        head_dim=Count("head_dim", absent=256),
        kinds=_last_full,
        layers={FULL: _wide, SLIDING: rule},
        sharing=last_layers_share(0),
        ignores=_DECLARED,
    )


FAMILIES: dict[str, Reader] = {
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma3n_text": replace(
        _GEMMA2,
        sizes=sizes(2048, 35, 8),
        kv_heads=Count("num_key_value_heads", absent=2),
        kinds=layer_types(every_nth(5)),
        layers={FULL: full, SLIDING: sliding(absent=512)},
        sharing=last_layers_share(15),
    ),
    "gemma4_text": _gemma4(512),
    "gemma4_unified_text": _gemma4(1024),
    "vaultgemma": _GEMMA2,
}
