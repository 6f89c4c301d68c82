"""Families with linear attention, alone or among layers that attend to keys."""

from collections.abc import Mapping
from dataclasses import replace

from kvjax.sizing.config import Count, Fields
from kvjax.sizing.families.family import (
    FULL,
    HEAD_DIM,
    KV_HEADS,
    LINEAR,
    SLIDING,
    Family,
    Kinds,
    Reader,
    Shape,
    every,
    full,
    sizes,
    sliding,
)
from kvjax.sizing.families.hybrid_kinds import (
    ATTENTION_FIELDS,
    LATENT_FIELDS,
    cycled,
    whole_numbers,
)
from kvjax.sizing.families.kinds import every_nth, layer_types
from kvjax.sizing.families.linear_attention import (
    GatedDelta,
    Kda,
    bailing_kda,
    lightning,
    linear_config,
    mlstm,
    olmo_delta,
    rg_lru,
    rwkv,
)
from kvjax.sizing.families.mla import Mla
from kvjax.sizing.layer import LayerSpec, state_layer
from kvjax.sizing.states import State

_H256 = Count("head_dim", absent=256)


def _qwen(width: int, depth: int, query_heads: int, kv_heads: int) -> Family:
    """Qwen3-Next and its kin: each `full_attention_interval`-th layer attends."""
    interval = every_nth(4, LINEAR, FULL, name="full_attention_interval")
    return Family(
        sizes(width, depth, query_heads),
        kv_heads=Count("num_key_value_heads", absent=kv_heads),
        head_dim=_H256,
        kinds=layer_types(interval, LINEAR, FULL),
        layers={FULL: full, LINEAR: GatedDelta()},
        ignores=ATTENTION_FIELDS,
    )


def _olmo_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """Each fourth layer attends, and the last of a model with fewer."""
    kinds = every_nth(4, LINEAR, FULL)(fields, depth)
    return kinds if FULL in kinds else (*kinds[:-1], FULL)


def _minimax_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """`attn_type_list` of the published configs: 1 attends, 0 is linear; else all even layers."""
    given = fields.get("attn_type_list")
    if given is None:
        return cycled(FULL, LINEAR)(fields, depth)
    if not isinstance(given, list) or len(given) != depth or not all(x in (0, 1) for x in given):
        raise ValueError(
            f"attn_type_list: got {given!r}; accepted: 0 or 1 for each of {depth} layers"
        )
    return tuple(FULL if attends else LINEAR for attends in given)


def _minimax_attention(fields: Fields, shape: Shape) -> LayerSpec:
    """A window where `sliding_window` is set, of which transformers' own cache knows nothing."""
    layer = full(fields, shape)
    window = fields.get("sliding_window")
    if window is None:
        return layer
    return replace(layer, window=fields.count(Count("sliding_window")), hf=layer)


def _griffin_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """`block_types` in turn."""
    named = {"recurrent": LINEAR, "attention": SLIDING}
    blocks = fields.get("block_types", ["recurrent", "recurrent", "attention"])
    if not isinstance(blocks, list | tuple) or not blocks or not all(b in [*named] for b in blocks):
        raise ValueError(f"block_types: got {blocks!r}; accepted: a list of {', '.join(named)}")
    return cycled(*(named[block] for block in blocks))(fields, depth)


# --- layers with a latent among those with KDA

_KIMI_LATENT = Mla(query=None)
_KIMI_KDA = Kda(heads=32)
# What transformers takes for a layer is not what the published config means: suffix of its kind.
_FOR_HF = " for transformers"


def _kimi_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """Latent layers by `full_attn_layers`, numbers from 1, else each fourth after the first.

    transformers reads `full_attn_layers` only beside `kda_layers`; a kind ends in `_FOR_HF` where
    it takes the layer for the other one.
    """
    own = linear_config(fields)
    theirs = tuple(FULL if index and index % 4 == 0 else LINEAR for index in range(depth))
    numbers = own.get("full_attn_layers")
    if numbers is None:
        return theirs
    latent = whole_numbers("linear_attn_config.full_attn_layers", numbers)
    outside = sorted(number for number in latent if not 1 <= number <= depth)
    if outside:
        raise ValueError(
            f"linear_attn_config.full_attn_layers: got {outside}; accepted: from 1 to {depth}"
        )
    kinds = tuple(FULL if index + 1 in latent else LINEAR for index in range(depth))
    if own.has("kda_layers"):
        return kinds
    return tuple(
        kind if kind == taken else kind + _FOR_HF for kind, taken in zip(kinds, theirs, strict=True)
    )


def _kimi_latent_for_hf(fields: Fields, shape: Shape) -> LayerSpec:
    return replace(_KIMI_LATENT(fields, shape), hf=_KIMI_KDA(fields, shape))


def _kimi_kda_for_hf(fields: Fields, shape: Shape) -> LayerSpec:
    return replace(_KIMI_KDA(fields, shape), hf=_KIMI_LATENT(fields, shape))


def _ring_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """Ring-linear: the last layer of each group attends, and so do those after the last group."""
    group = fields.count(Count("layer_group_size"))
    grouped = depth // group * group
    return tuple(
        FULL if (index + 1) % group == 0 or index >= grouped else LINEAR for index in range(depth)
    )


def _ring_lightning(fields: Fields, shape: Shape) -> LayerSpec:
    """Lightning attention by a kernel that keeps its state in f32."""
    n, h = shape.query_heads(fields), shape.head_dim(fields)
    return state_layer(State("recurrent", n * h * h, shards=n, itemsize=4))


def _lara_kinds() -> Kinds:
    return layer_types(cycled(LINEAR, SLIDING, LINEAR, FULL, SLIDING), LINEAR, SLIDING, FULL)


_MINIMAX = Family(
    sizes(4096, 32, 32),
    kv_heads=replace(KV_HEADS, absent=8),
    kinds=layer_types(_minimax_kinds, FULL, LINEAR),
    layers={FULL: _minimax_attention, LINEAR: lightning},
    ignores=ATTENTION_FIELDS | {"attn_type_list", "sliding_window"},
)

_KIMI = Family(
    sizes(2304, 27, 32),
    kinds=layer_types(_kimi_kinds, LINEAR, FULL),
    layers={
        FULL: _KIMI_LATENT,
        LINEAR: _KIMI_KDA,
        FULL + _FOR_HF: _kimi_latent_for_hf,
        LINEAR + _FOR_HF: _kimi_kda_for_hf,
    },
    ignores=LATENT_FIELDS | {"linear_attn_config", "num_nextn_predict_layers"},
)

FAMILIES: Mapping[str, Reader] = {
    "qwen3_next": _qwen(2048, 48, 16, 2),
    "qwen3_5_text": _qwen(4096, 32, 16, 4),
    "qwen3_5_moe_text": _qwen(2048, 40, 16, 2),
    "olmo_hybrid": Family(
        sizes(3840, 32, 30),
        kinds=layer_types(_olmo_kinds, LINEAR, FULL),
        layers={FULL: full, LINEAR: olmo_delta},
        ignores=ATTENTION_FIELDS,
    ),
    "lara_mini": Family(
        sizes(1024, 34, 16),
        kv_heads=Count("num_key_value_heads", absent=4),
        head_dim=Count("head_dim", absent=128),
        kinds=_lara_kinds(),
        layers={
            FULL: full,
            SLIDING: sliding(absent=512),
            LINEAR: GatedDelta(key_heads=8, value_heads=16),
        },
        ignores=ATTENTION_FIELDS | {"sliding_window"},
    ),
    "kimi_linear": _KIMI,
    # Its experts work in a width of their own, so that the name stands for other parameters.
    "kimi_k3_text": _KIMI,
    "bailing_moe_linear": Family(
        sizes(2048, 20, 16),
        kv_heads=Count("num_key_value_heads"),
        kinds=_ring_kinds,
        layers={FULL: full, LINEAR: _ring_lightning},
        ignores=ATTENTION_FIELDS | {"num_nextn_predict_layers"},
    ),
    "bailing_hybrid": Family(
        sizes(2560, 42, 32),
        head_dim=replace(HEAD_DIM, absent=128),
        kinds=layer_types(every_nth(6, LINEAR, FULL, name="layer_group_size"), LINEAR, FULL),
        layers={FULL: Mla(query=None), LINEAR: bailing_kda},
        ignores=LATENT_FIELDS | {"num_nextn_predict_layers"},
    ),
    "minimax": _MINIMAX,
    # The names under which the same models were published with their own code.
    "minimax_text_01": _MINIMAX,
    "minimax_m1": _MINIMAX,
    "recurrent_gemma": Family(
        sizes(2560, 26, 10),
        kinds=_griffin_kinds,
        layers={
            LINEAR: rg_lru,
            SLIDING: sliding("attention_window_size", absent=2048),
        },
        ignores=ATTENTION_FIELDS | {"layers_block_type", "layer_types"},
    ),
    "rwkv": Family(sizes(4096, 32, 1), kinds=every(LINEAR), layers={LINEAR: rwkv}),
    "xlstm": Family(
        sizes(4096, 32, 8, ("hidden_size", "num_hidden_layers", "num_heads")),
        kinds=every(LINEAR),
        layers={LINEAR: mlstm},
    ),
}
