"""GPT-2 and its kin: heads of width D / N, and flags or parts of a config that say how many keep K
and V."""

from dataclasses import replace

from kvjax.sizing.config import Count, Fields, Flag
from kvjax.sizing.families.family import (
    DERIVED,
    FULL,
    GPT_NAMES,
    SLIDING,
    Family,
    Reader,
    Shape,
    Sizes,
    full,
    sizes,
)
from kvjax.sizing.layer import LayerSpec, state_layer


def with_cross(fields: Fields, shape: Shape) -> LayerSpec | tuple[LayerSpec, ...]:
    """Attention to all keys and, with `add_cross_attention`, to a source."""
    own = full(fields, shape)
    if not fields.flag(Flag("add_cross_attention", False)):
        return own
    return own, replace(own, cross=True)


def _width_of(sized: Sizes) -> Sizes:
    """The sizes, with BLOOM's old name of D."""
    return replace(sized, width=replace(sized.width, also=(*sized.width.also, "n_embed")))


def _mqa(fields: Fields, shape: Shape) -> LayerSpec | tuple[LayerSpec, ...]:
    """GPT-BigCode: one KV head unless `multi_query` is false."""
    multi_query = fields.flag(Flag("multi_query", True))
    layer = with_cross(fields, shape)
    if not multi_query:
        return layer
    if isinstance(layer, tuple):
        raise ValueError(
            "add_cross_attention: got True with multi_query; accepted: false, or multi_query false"
        )
    return replace(layer, kv_heads=1)


def _falcon(fields: Fields, shape: Shape) -> LayerSpec:
    """Falcon: K heads, one, or N, by two flags; transformers caches N where they are grouped."""
    n, h = shape.query_heads(fields), shape.head_dim(fields)
    mha = LayerSpec(n, n, h, h)
    grouped = fields.flag(Flag("new_decoder_architecture", False))
    multi_query = fields.flag(Flag("multi_query", True))
    k = shape.kv_heads(fields)
    if grouped:
        return replace(mha, kv_heads=k, hf=mha)
    if multi_query:
        return replace(mha, kv_heads=1)
    if k != n:
        raise ValueError(
            f"num_kv_heads: got {k} without new_decoder_architecture or multi_query; accepted: {n}"
        )
    return mha


def part_of(fields: Fields, name: str) -> Fields:
    """The fields of a config inside the config; none where it is absent or null."""
    return Fields(fields.part(name) or {}, f"{fields.model_type} ({name})", nested=True)


def _mpt(fields: Fields, shape: Shape) -> LayerSpec:
    """MPT: transformers' class has Q, K and V of N heads whatever `attn_type` says."""
    n, h = shape.query_heads(fields), shape.head_dim(fields)
    mha = LayerSpec(n, n, h, h)
    attention = part_of(fields, "attn_config")
    kind = attention.get("attn_type", "multihead_attention")
    if kind == "multihead_attention":
        attention.ignore({"kv_n_heads"})
        layer = mha
    elif kind == "multiquery_attention":
        attention.ignore({"kv_n_heads"})
        layer = replace(mha, kv_heads=1, hf=mha)
    elif kind == "grouped_query_attention":
        layer = replace(mha, kv_heads=attention.count(Count("kv_n_heads")))
    else:
        raise ValueError(
            f"attn_config.attn_type: got {kind!r}; accepted: multihead_attention, "
            "multiquery_attention, grouped_query_attention"
        )
    attention.refuse_unread()
    return layer


def _dbrx(fields: Fields, shape: Shape) -> LayerSpec:
    """DBRX: K is in `attn_config`."""
    n, h = shape.query_heads(fields), shape.head_dim(fields)
    attention = part_of(fields, "attn_config")
    layer = LayerSpec(n, attention.count(Count("kv_n_heads", absent=1)), h, h)
    attention.refuse_unread()
    return layer


def _recomputed(fields: Fields, shape: Shape) -> LayerSpec:
    """GPT-1: transformers' class keeps nothing and computes all keys anew at each step."""
    return replace(full(fields, shape), hf=state_layer())


def _attention_types(fields: Fields, depth: int) -> tuple[str, ...]:
    """GPT-Neo: a list of (kinds, how often) that unrolls to the kind of each layer."""
    given, pairs = fields.get("attention_layers"), fields.get("attention_types")
    name = "attention_layers"
    if given is None:
        name, given = "attention_types", pairs
        try:
            pairs = pairs or [[["global", "local"], 12]]
            given = [kind for kinds, times in pairs for kind in list(kinds) * times]
        except (TypeError, ValueError):
            pass  # not such pairs, and so no list of kinds
    names = {"global": FULL, "local": SLIDING}
    if not isinstance(given, list) or len(given) != depth or not all(k in [*names] for k in given):
        raise ValueError(
            f"{name}: got {given!r}; accepted: global or local for each of {depth} layers"
        )
    return tuple(names[kind] for kind in given)


def _local(fields: Fields, shape: Shape) -> LayerSpec:
    """GPT-Neo's local attention; transformers keeps all keys of it."""
    layer = full(fields, shape)
    window = fields.count(Count("window_size", absent=256))
    return replace(layer, window=window, hf=layer)


def _jetmoe(fields: Fields, shape: Shape) -> LayerSpec:
    """JetMoE: each of the experts picked for a token has queries of its own, K and V are shared."""
    fields.ignore({"num_attention_heads"})
    k = fields.count(Count("num_key_value_heads", absent=16))
    h = fields.count(Count("kv_channels", absent=128, also=("head_dim",)))
    return LayerSpec(k * fields.count(Count("num_experts_per_tok", absent=2)), k, h, h)


def _mha(width: int, depth: int, heads: int, names: tuple[str, str, str] = GPT_NAMES) -> Family:
    """MHA, under other names of D, of the number of layers and of N."""
    return Family(sizes(width, depth, heads, names), kv_heads=None, head_dim=None)


_GPT2 = _mha(768, 12, 12)
_GPT_NEOX = Family(sizes(6144, 44, 64), kv_heads=None, head_dim=None)
_CROSS = {FULL: with_cross}

FAMILIES: dict[str, Reader] = {
    "bloom": replace(
        _mha(64, 2, 8, ("hidden_size", "n_layer", "n_head")),
        sizes=_width_of(sizes(64, 2, 8, ("hidden_size", "n_layer", "n_head"))),
    ),
    "codegen": _mha(4096, 28, 16),
    "ctrl": _mha(1280, 48, 16),
    # Saved configs repeat what `attn_config` says.
    "dbrx": replace(
        _mha(2048, 24, 16, ("d_model", "n_layers", "n_heads")),
        layers={FULL: _dbrx},
        ignores=frozenset({"num_key_value_heads"}),
    ),
    "falcon": Family(
        Sizes(
            Count("hidden_size", also=("n_embed",), nested=4544),
            Count("num_hidden_layers", also=("n_layer",), nested=32),
            Count("num_attention_heads", also=("n_head",), nested=71),
        ),
        kv_heads=Count("num_kv_heads", absent=DERIVED, null=DERIVED),
        head_dim=None,
        layers={FULL: _falcon},
    ),
    "gpt-sw3": replace(_GPT2, layers=_CROSS),
    "gpt2": replace(_GPT2, layers=_CROSS),
    "imagegpt": replace(_GPT2, sizes=sizes(512, 24, 8, GPT_NAMES), layers=_CROSS),
    # Saved configs repeat what `multi_query` says.
    "gpt_bigcode": replace(_GPT2, layers={FULL: _mqa}, ignores=frozenset({"num_key_value_heads"})),
    "gpt_neo": replace(
        _mha(2048, 24, 16, ("hidden_size", "num_layers", "num_heads")),
        kinds=_attention_types,
        layers={FULL: full, SLIDING: _local},
        ignores=frozenset({"window_size"}),
    ),
    "gpt_neox": _GPT_NEOX,
    "gpt_neox_japanese": Family(sizes(2560, 32, 32), kv_heads=None, head_dim=None),
    "gptj": _mha(4096, 28, 16),
    "jetmoe": Family(sizes(2048, 12, 32), layers={FULL: _jetmoe}),
    # Checkpoints of two of these after their KV heads were pooled, which transformers' own classes
    # cannot express.
    "kvjax_gpt2": replace(_GPT2, kv_heads=Count("num_key_value_heads")),
    "kvjax_gpt_neox": replace(_GPT_NEOX, kv_heads=Count("num_key_value_heads")),
    "kosmos_2_text_model": replace(
        _mha(2048, 24, 32, ("embed_dim", "layers", "attention_heads")), layers=_CROSS
    ),
    "kosmos_2_5_text_model": _mha(1536, 24, 16, ("embed_dim", "layers", "attention_heads")),
    "mpt": replace(_mha(2048, 24, 16, ("d_model", "n_layers", "n_heads")), layers={FULL: _mpt}),
    "openai-gpt": replace(_GPT2, layers={FULL: _recomputed}),
    "xglm": replace(
        _mha(1024, 24, 16, ("d_model", "num_layers", "attention_heads")), layers=_CROSS
    ),
}
