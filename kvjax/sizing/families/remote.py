"""Published families that transformers has no class for, as their own code reads the config."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvjax.sizing.checks import whole
from kvjax.sizing.config import Count, Fields, Flag
from kvjax.sizing.families.family import (
    DERIVED,
    FULL,
    GPT_NAMES,
    HEAD_DIM,
    Family,
    Reader,
    Shape,
    Sizes,
    full,
    sizes,
)
from kvjax.sizing.families.gpt import part_of
from kvjax.sizing.families.kinds import if_set
from kvjax.sizing.families.plain import UNUSED_LATENT
from kvjax.sizing.families.rows import kv_heads, windowed
from kvjax.sizing.layer import LayerSpec, state_layer
from kvjax.sizing.spec import ModelSpec


def _chatglm(fields: Fields, shape: Shape) -> LayerSpec:
    """ChatGLM: MHA, or with `multi_query_attention` as many KV heads as there are groups."""
    n, h = shape.query_heads(fields), shape.head_dim(fields)
    groups = fields.count(Count("multi_query_group_num", absent=1, also=("n_head_kv",)))
    return LayerSpec(n, groups if fields.flag(Flag("multi_query_attention", False)) else n, h, h)


def _codeshell(fields: Fields, shape: Shape) -> LayerSpec:
    """CodeShell: MHA, or with `group_query_attention` as many KV heads as there are groups."""
    n, h = shape.query_heads(fields), shape.head_dim(fields)
    grouped = fields.flag(Flag("group_query_attention", False))
    fields.ignore({"num_query_groups"})
    return LayerSpec(n, fields.count(Count("num_query_groups")) if grouped else n, h, h)


def _refined_web(fields: Fields, shape: Shape) -> LayerSpec:
    """The first Falcons: `n_head_kv` KV heads, else one with `multi_query`, else N."""
    n, h = shape.query_heads(fields), shape.head_dim(fields)
    multi_query = fields.flag(Flag("multi_query", False))
    kept = Count("n_head_kv", absent=DERIVED, null=DERIVED)
    return LayerSpec(n, fields.count(kept, derived=lambda: 1 if multi_query else n), h, h)


def _plamo(fields: Fields, shape: Shape) -> LayerSpec:
    """PLaMo: as many query heads as `n_shared_head` share one KV head."""
    n, h = shape.query_heads(fields), shape.head_dim(fields)
    shared = fields.count(Count("n_shared_head", absent=8))
    if n % shared:
        raise ValueError(
            f"n_shared_head: got {shared} with num_attention_heads {n}; accepted: a divisor"
        )
    return LayerSpec(n, n // shared, h, h)


def _step3(fields: Fields, shape: Shape) -> LayerSpec:
    """Step-3's MFA: one KV head, and queries through a bottleneck that their heads share."""
    rank = fields.count(Count("share_q_dim", absent=2048))
    return replace(full(fields, shape), query_rank=rank)


def _cross_layer(fields: Fields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Hunyuan: with `use_cla` runs of `cla_share_factor` layers read the records of the first."""
    factor = fields.number("cla_share_factor", 1, 1)
    if not fields.flag(Flag("use_cla", False)):
        return layers
    return tuple(
        replace(layer, shares_with=index - index % factor) if index % factor else layer
        for index, layer in enumerate(layers)
    )


@dataclass(frozen=True)
class _Listed:
    """A family whose config lists what differs from layer to layer.

    Attributes:
        width, depth: the fields of D and of the number of layers.
        layers: the layers, from the fields, D and their number.
    """

    width: Count
    depth: Count
    layers: Callable[[Fields, int, int], tuple[LayerSpec, ...]]

    def read(self, fields: Fields) -> ModelSpec:
        """The model that the config describes."""
        d_model, depth = fields.count(self.width), fields.count(self.depth)
        layers = self.layers(fields, d_model, depth)
        fields.refuse_unread()
        return ModelSpec(fields.model_type, d_model, layers)


def _list(fields: Fields, name: str, depth: int) -> list:
    """A field that holds one item for each layer."""
    value = fields.get(name)
    if not isinstance(value, list) or len(value) != depth:
        raise ValueError(f"{name}: got {value!r}; accepted: a list of {depth}, one for each layer")
    return value


def _share(d_model: int, query_heads: int) -> int:
    """H as D / N."""
    if d_model % query_heads:
        raise ValueError(
            f"num_attention_heads: got {query_heads} with hidden_size {d_model}; "
            "accepted: a divisor of hidden_size"
        )
    return d_model // query_heads


def _openelm(fields: Fields, d_model: int, depth: int) -> tuple[LayerSpec, ...]:
    """OpenELM: query and KV heads of each layer."""
    h = fields.count(Count("head_dim"))
    heads = _list(fields, "num_query_heads", depth), _list(fields, "num_kv_heads", depth)
    return tuple(LayerSpec(n, k, h, h) for n, k in zip(*heads, strict=True))


def _deci(fields: Fields, d_model: int, depth: int) -> tuple[LayerSpec, ...]:
    """DeciLM: KV heads of each layer."""
    n = fields.count(Count("num_attention_heads"))
    h = fields.count(HEAD_DIM, derived=lambda: _share(d_model, n))
    fields.ignore({"num_key_value_heads"})
    return tuple(
        LayerSpec(n, k, h, h) for k in _list(fields, "num_key_value_heads_per_layer", depth)
    )


def _nemotron_nas(fields: Fields, d_model: int, depth: int) -> tuple[LayerSpec, ...]:
    """Nemotron found by architecture search: blocks without attention, or with groups of a size."""
    n = fields.count(Count("num_attention_heads"))
    h = fields.count(HEAD_DIM, derived=lambda: _share(d_model, n))
    fields.ignore({"num_key_value_heads"})
    return tuple(
        _block(block, fields.model_type, n, h) for block in _list(fields, "block_configs", depth)
    )


def _block(block: object, model_type: str, n: int, h: int) -> LayerSpec:
    if not isinstance(block, Mapping):
        raise ValueError(f"block_configs: got {block!r}; accepted: JSON objects")
    fields = Fields(block, model_type, nested=True)
    attention = part_of(fields, "attention")
    for name in ("window_length", "num_sink_tokens", "sparsify"):
        if attention.get(name):
            raise ValueError(
                f"block_configs.attention.{name}: got {attention.get(name)!r}; accepted: null"
            )
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return state_layer()
    group = whole("block_configs.attention.n_heads_in_group", attention.get("n_heads_in_group"))
    if n % group:
        raise ValueError(
            f"block_configs.attention.n_heads_in_group: got {group} with num_attention_heads {n}; "
            "accepted: a divisor"
        )
    return LayerSpec(n, n // group, h, h)


_LLAMA = Family(sizes(4096, 32, 32), head_dim=None)
_MHA = replace(_LLAMA, kv_heads=None)
_MIXFORMER = Family(sizes(1024, 20, 16, GPT_NAMES), kv_heads=None, head_dim=None)
_RW_NAMES = ("hidden_size", "n_layer", "n_head")
_REFINED_WEB = Family(
    sizes(4544, 32, 71, _RW_NAMES), kv_heads=None, head_dim=None, layers={FULL: _refined_web}
)
_CHANNELS = Count("kv_channels", absent=128)
# Their code names a window; `use_sliding_window` is not read, so that a config that sets it is
# refused.
_BAILING = Family(
    sizes(2048, 28, 16),
    kv_heads=Count("num_key_value_heads"),
    ignores=frozenset({"max_window_layers", "num_nextn_predict_layers", "sliding_window"}),
)

FAMILIES: dict[str, Reader] = {
    "RefinedWeb": _REFINED_WEB,
    "RefinedWebModel": _REFINED_WEB,
    # The first Yi models differ in what their code takes where K is absent.
    "Yi": replace(_LLAMA, kv_heads=Count("num_key_value_heads")),
    "PanguEmbedded": _LLAMA,
    "aquila": _LLAMA,
    "arctic": windowed(sizes(4096, 32, 32), dim=None, kinds=if_set("sliding_window")),
    "baichuan": _MHA,
    # Ling and Ring.
    "bailing_moe": _BAILING,
    "bailing_moe_v2": _BAILING,
    "chatglm": Family(
        sizes(4096, 28, 32, ("hidden_size", "num_layers", "num_attention_heads")),
        kv_heads=None,
        head_dim=_CHANNELS,
        layers={FULL: _chatglm},
    ),
    "codeshell": Family(
        sizes(4096, 42, 32, GPT_NAMES), kv_heads=None, head_dim=None, layers={FULL: _codeshell}
    ),
    "deci": _Listed(Count("hidden_size"), Count("num_hidden_layers"), _deci),
    "deepseek": Family(sizes(4096, 30, 32), kv_heads(32), head_dim=None),
    "grok-1": Family(sizes(6144, 64, 48), kv_heads(8), head_dim=None),
    "hunyuan": Family(
        sizes(4096, 32, 32),
        head_dim=replace(HEAD_DIM, also=("attention_head_dim",)),
        sharing=_cross_layer,
        ignores=UNUSED_LATENT,
    ),
    "internlm": _LLAMA,
    "internlm2": _LLAMA,
    "jais": Family(sizes(768, 12, 12, GPT_NAMES), kv_heads=None, head_dim=None),
    "minicpm": _LLAMA,
    "mixformer-sequential": _MIXFORMER,
    "nemotron-nas": _Listed(Count("hidden_size"), Count("num_hidden_layers"), _nemotron_nas),
    "openelm": _Listed(Count("model_dim"), Count("num_transformer_layers"), _openelm),
    "orion": _LLAMA,
    "phi-msft": replace(_MIXFORMER, kv_heads=Count("n_head_kv", absent=DERIVED, null=DERIVED)),
    # Its block-sparse layers read fewer keys and keep all of them.
    "phi3small": Family(sizes(4096, 32, 32), kv_heads(8), head_dim=None),
    "plamo": replace(_MHA, sizes=sizes(4096, 32, 32), layers={FULL: _plamo}),
    # The first revisions have GPT-2's names.
    "qwen": Family(
        Sizes(
            Count("hidden_size", also=("n_embd",)),
            Count("num_hidden_layers", also=("n_layer",)),
            Count("num_attention_heads", also=("n_head",)),
        ),
        kv_heads=None,
        head_dim=_CHANNELS,
    ),
    "step3_text": Family(
        sizes(7168, 61, 64),
        kv_heads=Count("num_attention_groups", absent=1),
        head_dim=Count("head_dim", absent=256),
        layers={FULL: _step3},
    ),
    "telechat": Family(sizes(4096, 30, 32, _RW_NAMES), head_dim=None),
    "telechat3": Family(sizes(4096, 32, 32)),
    "xverse": _LLAMA,
}
