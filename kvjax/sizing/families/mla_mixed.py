"""Families that mix MLA with windows, with shared records, or with layers without rope."""

from collections.abc import Mapping
from dataclasses import replace

from kvjax.sizing.config import Count, Fields, Flag
from kvjax.sizing.families.family import FULL, SLIDING, Family, LayerRule, Reader, Shape, sizes
from kvjax.sizing.families.indexed import BY_FREQUENCY, INDEXED, REUSING, first_items
from kvjax.sizing.families.kinds import layer_types
from kvjax.sizing.families.mla import Mla, indexed, reuses_picks
from kvjax.sizing.layer import LayerSpec

_DOTS = Mla(query=1024)
# What Dots 3 Note's class takes for fields of its windowed layers, which earlier configs spell with
# `swa_` before them; later ones have `per_layer_config`.
_DOTS_WINDOWED = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}


def _dots_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """Dots 3 Note: `layer_types`, where `use_dsa` turns full into indexed attention, or back.

    Without that field and without `per_layer_config`, full attention is indexed.
    """
    uses_index = fields.get("use_dsa", None if fields.has("per_layer_config") else True)
    common = FULL if uses_index is False else INDEXED
    windows = fields.flag(Flag("use_sliding_window", absent=True))

    def pattern(fields: Fields, depth: int) -> tuple[str, ...]:
        return tuple(
            common if not windows or i < 2 or i % 4 == 1 else SLIDING for i in range(depth)
        )

    kinds = layer_types(pattern, FULL, SLIDING, INDEXED)(fields, depth)
    if uses_index is None:
        return kinds
    return tuple(kind if kind == SLIDING else common for kind in kinds)


def _dots_index(fields: Fields, shape: Shape) -> LayerSpec:
    """An indexed layer, whose index keys transformers keeps in f32, as its rope makes them."""
    layer = indexed(_DOTS)(fields, shape)
    assert isinstance(layer, LayerSpec)
    return replace(layer, hf=replace(layer, index_itemsize=4))


def _dots_window(fields: Fields, shape: Shape) -> LayerSpec:
    """A windowed layer, by `per_layer_config` or by the fields before it."""
    old = fields.number("sliding_window_size", 512, least=1)
    window = fields.count(Count("sliding_window", absent=old, null=old))
    if fields.has("per_layer_config"):
        return replace(_DOTS(fields, shape), window=window)
    size = {
        name: fields.number(f"swa_{name}", absent, least=1)
        for name, absent in _DOTS_WINDOWED.items()
    }
    rope = fields.number("swa_qk_rope_head_dim", size["head_dim"] - size["qk_nope_head_dim"])
    return LayerSpec(
        query_heads=size["num_attention_heads"],
        kv_heads=1,
        key_dim=size["qk_nope_head_dim"] + rope,
        value_dim=size["v_head_dim"],
        kind="latent",
        window=window,
        latent_rank=size["kv_lora_rank"],
        rope_dim=rope,
        query_rank=size["q_lora_rank"],
    )


# A layer of Mistral Large 4 whose keys have no rope, with an index of its own or without.
_NOPE = {INDEXED: "indexed_nope", REUSING: "reusing_nope"}


def _large4_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """Mistral Large 4: `indexer_types`, and `no_rope_layers` (1 where rope is used)."""
    kinds = BY_FREQUENCY(fields, depth)
    given = fields.get("no_rope_layers")
    if given is None:
        step = fields.number("no_rope_layer_interval", 4, least=1)
        ropes: tuple[int, ...] = tuple(int((i + 1) % step != 0) for i in range(depth))
    else:
        ropes = first_items("no_rope_layers", given, depth, {0: 0, 1: 1})
    return tuple(kind if rope else _NOPE[kind] for kind, rope in zip(kinds, ropes, strict=True))


def _large4(fields: Fields, shape: Shape) -> LayerSpec:
    """A layer with rope; its queries have no bottleneck."""
    return replace(Mla(nope=64)(fields, shape), query_rank=None)


def _large4_nope(fields: Fields, shape: Shape) -> LayerSpec:
    """A layer without rope: its keys are as wide, but come from the latent alone."""
    return replace(_large4(fields, shape), rope_dim=0)


def _shared_latents(fields: Fields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """`kv_source_layers`: the layer whose latent each one reads.

    A layer that reads another's latent and has an index of its own keeps that index's keys.
    """
    sources = fields.get("kv_source_layers")
    if sources is None:
        return layers
    own = {index: index for index in range(len(layers))}
    sources = first_items("kv_source_layers", sources, len(layers), own)
    kept: list[LayerSpec] = []
    producers: dict[int, int] = {}
    for index, (layer, source) in enumerate(zip(layers, sources, strict=True)):
        if source == index:
            producers[index] = len(kept)
            kept.append(layer)
        elif source in producers:
            kept.append(replace(layer, shares_with=producers[source], index_dim=0))
            if layer.index_dim:
                kept.append(LayerSpec(0, 0, 0, 0, kind="state", index_dim=layer.index_dim))
        else:
            raise ValueError(
                f"kv_source_layers: got {source} for layer {index}; accepted: that layer, or an "
                "earlier one that keeps its own records"
            )
    return tuple(kept)


_LARGE4: Mapping[str, LayerRule] = {
    INDEXED: indexed(_large4),
    REUSING: reuses_picks(_large4),
    _NOPE[INDEXED]: indexed(_large4_nope),
    _NOPE[REUSING]: reuses_picks(_large4_nope),
}

FAMILIES: Mapping[str, Reader] = {
    "dots3_note_text": Family(
        sizes(5120, 46, 128),
        kinds=_dots_kinds,
        layers={FULL: _DOTS, INDEXED: _dots_index, SLIDING: _dots_window},
        ignores=frozenset(
            {"num_nextn_predict_layers", "index_head_dim", "index_n_heads", "sliding_window"}
            | {"sliding_window_size", "swa_qk_rope_head_dim", "per_layer_config"}
            | {f"swa_{name}" for name in _DOTS_WINDOWED}
        ),
    ),
    "mistral_large4_text": Family(
        sizes(6144, 72, 64),
        kinds=_large4_kinds,
        layers=_LARGE4,
        sharing=_shared_latents,
        ignores=frozenset({"num_nextn_predict_layers"}),
    ),
}
