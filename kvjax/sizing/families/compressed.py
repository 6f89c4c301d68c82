"""Families whose layers keep a window of tied keys and values and pools of compressed entries."""

from collections.abc import Mapping
from dataclasses import replace

from kvjax.sizing.config import Count, Fields
from kvjax.sizing.families.family import SLIDING, Family, LayerRule, Reader, Shape, sizes
from kvjax.sizing.families.indexed import first_items
from kvjax.sizing.layer import LayerSpec
from kvjax.sizing.states import Pool

# DeepSeek-V4's kinds of layers, as its class names them; CSA and HCA in its paper.
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"

# What the class takes for an entry of `compress_ratios`, the field of earlier configs. The ratio
# itself comes from `compress_rates`.
_BY_RATIO = {0: SLIDING, 4: CSA, 128: HCA}
_RATES = {CSA: ("compress_rate_csa", 4), HCA: ("compress_rate_hca", 128)}


def _kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """`layer_types`, else by `compress_ratios`, else two HCA layers and then both in turn.

    The lists may go on with the layers for multi-token prediction, which are not the model's.
    """
    ratios, names = fields.get("compress_ratios"), fields.get("layer_types")
    if names is None and ratios is not None:
        return first_items("compress_ratios", ratios, depth, _BY_RATIO)
    if names is not None:
        return first_items(
            "layer_types", names, depth, {kind: kind for kind in (SLIDING, CSA, HCA)}
        )
    return tuple(HCA if index < 2 or index % 2 == 0 else CSA for index in range(depth))


def _ratio(fields: Fields, kind: str) -> int:
    """Tokens an entry: a field of earlier configs before `compress_rates`."""
    legacy, absent = _RATES[kind]
    rates = fields.part("compress_rates")
    if fields.has(legacy) or rates is None:
        return fields.number(legacy, absent, least=1)
    return Fields(rates, f"{fields.model_type}'s compress_rates").count(Count(kind))


def _windowed(fields: Fields, shape: Shape, *pools: Pool) -> LayerSpec:
    """One head that is key and value at once, in a window, with pools beside it.

    transformers hands the head over as keys and as values, and so counts it twice.
    """
    fields.ignore({"num_key_value_heads", "qk_rope_head_dim"})
    width = shape.head_dim(fields)
    layer = LayerSpec(
        query_heads=shape.query_heads(fields),
        kv_heads=1,
        key_dim=width,
        value_dim=width,
        kind="tied",
        window=fields.count(Count("sliding_window", absent=128)),
        query_rank=fields.count(Count("q_lora_rank", absent=1024)),
        pools=pools,
    )
    return replace(layer, hf=replace(layer, kind="attention"))


def _gate_itemsize(fields: Fields) -> int | None:
    """Gates of a pool's previous entry: f32 where a checkpoint is loaded in a dtype.

    The bias that the gates carry stays f32 then; a model that is cast as a whole casts it too.
    """
    return 4 if fields.has("torch_dtype") or fields.has("dtype") else None


def _sparse(fields: Fields, shape: Shape) -> LayerSpec:
    """CSA: overlapping entries, and an index's own entries by which a query picks among them."""
    fields.ignore({"index_n_heads"})
    ratio, gate = _ratio(fields, CSA), _gate_itemsize(fields)
    top = fields.count(Count("index_topk", absent=512))
    entries = Pool(ratio, shape.head_dim(fields), overlap=True, top=top, gate_itemsize=gate)
    index = fields.count(Count("index_head_dim", absent=128))
    return _windowed(
        fields, shape, entries, Pool(ratio, index, overlap=True, gate_itemsize=gate, index=True)
    )


def _heavy(fields: Fields, shape: Shape) -> LayerSpec:
    """HCA: entries without overlap, all read by every query."""
    return _windowed(fields, shape, Pool(_ratio(fields, HCA), shape.head_dim(fields)))


_LAYERS: Mapping[str, LayerRule] = {SLIDING: _windowed, CSA: _sparse, HCA: _heavy}

FAMILIES: Mapping[str, Reader] = {
    "deepseek_v4": Family(
        sizes(4096, 43, 64),
        kv_heads=None,
        head_dim=Count("head_dim", absent=512),
        kinds=_kinds,
        layers=_LAYERS,
        ignores=frozenset(
            {"num_nextn_predict_layers", "index_n_heads", "index_head_dim", "index_topk"}
            | {"compress_rates", "compress_rate_csa", "compress_rate_hca"}
        ),
    ),
}
