"""Families whose queries read only the tokens that an index picks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvjax.sizing.checks import whole
from kvjax.sizing.config import Count, Fields
from kvjax.sizing.families.family import (
    FULL,
    Family,
    Kinds,
    Reader,
    Shape,
    every,
    full,
    sizes,
)
from kvjax.sizing.families.kinds import layer_types
from kvjax.sizing.families.mla import Mla, indexed, reuses_picks
from kvjax.sizing.layer import LayerSpec
from kvjax.sizing.states import Pool

# A layer with an index of its own, and one that takes the picks of the last such layer.
INDEXED, REUSING = "indexed_attention", "reusing_attention"
_BY_NAME = {"full": INDEXED, "shared": REUSING}
_BY_LETTER = {"F": INDEXED, "S": REUSING}

_IGNORED = frozenset({"num_nextn_predict_layers"})


def first_items[T](
    name: str, given: object, depth: int, accepted: Mapping[Any, T]
) -> tuple[T, ...]:
    """What the first `depth` items of a field stand for.

    Such a field may go on with the layers for multi-token prediction, which keep no cache here.

    Args:
        name: the field.
        given: its value, a list or a text with a letter for each layer.
        depth: layers of the model.
        accepted: what each accepted item stands for.
    """
    if not isinstance(given, list | str) or len(given) < depth:
        found = f"{len(given)} items" if isinstance(given, list | str) else repr(given)
        raise ValueError(f"{name}: got {found}; accepted: one for each of {depth} layers")
    for item in given[:depth]:
        if item not in list(accepted):  # a list, since an item from JSON may be unhashable
            raise ValueError(f"{name}: got {item!r}; accepted: {', '.join(map(str, accepted))}")
    return tuple(accepted[item] for item in given[:depth])


def _picks(otherwise: Callable[[Fields, int], Sequence[str]]) -> Kinds:
    """Which layers have an index of their own, by `indexer_types` or `otherwise`."""

    def read(fields: Fields, depth: int) -> tuple[str, ...]:
        given = fields.get("indexer_types")
        fields.ignore({"index_topk_pattern"})
        if given is None:
            return tuple(otherwise(fields, depth))
        return first_items("indexer_types", given, depth, _BY_NAME)

    return read


def _everywhere(picks: Kinds) -> Kinds:
    """The kinds by `picks`, where `layer_types` may say that all layers are sparse, and no more."""

    def read(fields: Fields, depth: int) -> tuple[str, ...]:
        layer_types(every(INDEXED), INDEXED)(fields, depth)
        return picks(fields, depth)

    return read


def _one_in_four(fields: Fields, depth: int) -> list[str]:
    """The first layer, and from the second on each fourth."""
    return [INDEXED if i == 0 or i % 4 == 1 else REUSING for i in range(depth)]


def _by_frequency(fields: Fields, depth: int) -> Sequence[str]:
    """By `index_topk_pattern`, else each `index_topk_freq`-th layer from the offset on."""
    pattern = fields.get("index_topk_pattern")
    if isinstance(pattern, str):
        return first_items("index_topk_pattern", pattern, depth, _BY_LETTER)
    if pattern is not None:
        return first_items("index_topk_pattern", pattern, depth, _BY_NAME)
    step = max(fields.number("index_topk_freq", 1), 1)
    start = fields.number("index_skip_topk_offset", 2) - 1
    return [REUSING if max(i - start, 0) % step else INDEXED for i in range(depth)]


PICKS_BY_FREQUENCY = _picks(_by_frequency)
BY_FREQUENCY = _everywhere(PICKS_BY_FREQUENCY)
_ALWAYS, _ONE_IN_FOUR = _everywhere(every(INDEXED)), _everywhere(_picks(_one_in_four))


def _family(width: int, depth: int, query_heads: int, kinds: Kinds, rule: Mla) -> Family:
    """A family with DSA over MLA in every layer, by its class's defaults."""
    return Family(
        sizes(width, depth, query_heads),
        kinds=kinds,
        layers={INDEXED: indexed(rule), REUSING: reuses_picks(rule)},
        ignores=_IGNORED,
    )


def _blocks_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """MiniMax-M3: `layer_types`, else the flags in `sparse_attention_config`."""
    nested = fields.part("sparse_attention_config") or {}
    flags = nested.get("sparse_attention_freq")
    if fields.has("layer_types") or flags is None:
        return layer_types(every(FULL), FULL, _SPARSE)(fields, depth)
    return first_items("sparse_attention_freq", flags, depth, {0: FULL, 1: _SPARSE})


def _blocks(fields: Fields, shape: Shape) -> LayerSpec:
    """MiniMax-M3's lightning index: one index key a token, by which blocks of tokens are picked.

    Its settings in `sparse_attention_config`, of the published configs, come before its own.
    """
    nested = fields.part("sparse_attention_config") or {}

    def setting(name: str, legacy: str, absent: int) -> int:
        own = fields.number(name, absent, least=1)
        return whole(legacy, nested[legacy]) if legacy in nested else own

    fields.ignore({"index_n_heads"})
    block = setting("index_block_size", "sparse_block_size", 128)
    width = setting("index_head_dim", "sparse_index_dim", 128)
    layer = replace(
        full(fields, shape),
        index_top=block * setting("index_topk_blocks", "sparse_topk_blocks", 16),
    )
    # The class keeps the index keys apart from keys and values, among the states.
    apart = replace(layer, pools=(Pool(1, width, index=True),))
    return replace(layer, index_dim=width, hf=apart)


_SPARSE = "minimax_m3_sparse"
_MINIMAX_M3 = Family(
    sizes(6144, 60, 64),
    kv_heads=Count("num_key_value_heads", absent=4),
    head_dim=Count("head_dim", absent=128),
    kinds=_blocks_kinds,
    layers={FULL: full, _SPARSE: _blocks},
    ignores=_IGNORED | {"index_head_dim", "index_n_heads", "sparse_attention_config"},
)

FAMILIES: Mapping[str, Reader] = {
    "axk2": _family(2048, 48, 32, _ALWAYS, Mla(128, rope=32, nope=64, value=64, query=384)),
    "deepseek_v32": _family(7168, 61, 128, _ALWAYS, Mla()),
    "glm_moe_dsa": _family(6144, 78, 64, BY_FREQUENCY, Mla(nope=192, value=256, query=2048)),
    "hy_v4": _family(2816, 34, 32, _ONE_IN_FOUR, Mla(nope=192, value=256)),
    "hy_v4_vl_text": _family(6144, 78, 64, _ONE_IN_FOUR, Mla(nope=192, value=256, query=2048)),
    "minimax_m3": _MINIMAX_M3,  # the text model, alone
    "minimax_m3_vl_text": _MINIMAX_M3,
}
