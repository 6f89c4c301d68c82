"""From a config.json to a ModelSpec: one declarative reader for each family.

A reader says which fields hold the cache's shape and what the family takes where one is absent or
null, as the family's configuration class in transformers 5 does. The sizes of the model (width,
depth, query heads) must be there. A family that is not listed, and a cache-shaped field that its
family does not have, are refused.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvjax.sizing.checks import whole
from kvjax.sizing.config import ConfigSource, Count, Fields, Flag, Otherwise, read_config
from kvjax.sizing.layer import LayerSpec
from kvjax.sizing.spec import ModelSpec
from kvjax.sizing.weights import Heads, QKNorm, WeightRules, count_weights

type Windows = Callable[[Fields, int], tuple[int | None, ...]]


def no_window(fields: Fields, depth: int) -> tuple[int | None, ...]:
    """Every layer sees all keys."""
    return (None,) * depth


def window_everywhere(absent: int | None) -> Windows:
    """Every layer has `sliding_window`, `absent` where the config lacks the field."""

    def read(fields: Fields, depth: int) -> tuple[int | None, ...]:
        return (_sliding_window(fields, absent),) * depth

    return read


def window_in_late_layers(fields: Fields, depth: int) -> tuple[int | None, ...]:
    """Qwen2 and Qwen3: a window in the layers that `layer_types` names.

    Without `layer_types`, in those from `max_window_layers` on; and in none at all unless
    `use_sliding_window` is true.
    """
    window = _sliding_window(fields, absent=4096)
    if not fields.flag(Flag("use_sliding_window", False)):
        window = None
    full_layers = whole("max_window_layers", fields.get("max_window_layers", 28), 0)
    names = fields.get("layer_types")
    if names is None:
        return tuple(window if index >= full_layers else None for index in range(depth))
    if not isinstance(names, list) or len(names) != depth:
        raise ValueError(
            f"layer_types: got {names!r}; accepted: one name for each of {depth} layers"
        )
    kinds: dict[str, int | None] = {"full_attention": None}
    if window is not None:
        kinds["sliding_attention"] = window
    for name in names:
        if name not in list(kinds):  # a list, since a name from JSON may be unhashable
            raise ValueError(
                f"layer_types: got {name!r} with a window of {window}; accepted: {', '.join(kinds)}"
            )
    return tuple(kinds[name] for name in names)


def _sliding_window(fields: Fields, absent: int | None) -> int | None:
    value = fields.get("sliding_window", absent)
    return None if value is None else whole("sliding_window", value)


@dataclass(frozen=True)
class Reader:
    """Where a family of plain attention layers keeps the shape of its cache.

    Attributes:
        kv_heads: the field of K; None where the family has none, so that K = N.
        head_dim: the field of H; None where the family has none, so that H = width / N.
        windows: the window of each layer, from the fields and the depth.
        weights: the parameters beside the attention projections.
        width, depth, query_heads: names of the fields of D, of the number of layers and of N.
    """

    kv_heads: Count | None
    head_dim: Count | None
    windows: Windows = no_window
    weights: WeightRules = field(default_factory=WeightRules)
    width: str = "hidden_size"
    depth: str = "num_hidden_layers"
    query_heads: str = "num_attention_heads"

    def read(self, fields: Fields) -> ModelSpec:
        """The model that the config describes."""
        d_model = fields.count(Count(self.width))
        depth = fields.count(Count(self.depth))
        heads = self._heads(fields, d_model)
        layers = tuple(
            LayerSpec(
                heads.query_heads, heads.kv_heads, heads.head_dim, heads.head_dim, window=window
            )
            for window in self.windows(fields, depth)
        )
        weights = count_weights(fields, self.weights, d_model, depth, heads)
        fields.refuse_unread()
        return ModelSpec(fields.model_type, d_model, layers, weights)

    def _heads(self, fields: Fields, d_model: int) -> Heads:
        query_heads = fields.count(Count(self.query_heads))

        def share_of_width() -> int:
            if d_model % query_heads:
                raise ValueError(
                    f"{self.query_heads}: got {query_heads} with {self.width} {d_model} and no "
                    f"head_dim; accepted: a divisor of {self.width}"
                )
            return d_model // query_heads

        kv_heads = query_heads
        if self.kv_heads is not None:
            kv_heads = fields.count(self.kv_heads, derived=lambda: query_heads)
            if query_heads % kv_heads:
                raise ValueError(
                    f"{self.kv_heads.name}: got {kv_heads} with {self.query_heads} {query_heads}; "
                    f"accepted: a divisor of {self.query_heads}"
                )
        if self.head_dim is None:
            return Heads(query_heads, kv_heads, share_of_width())
        return Heads(query_heads, kv_heads, fields.count(self.head_dim, derived=share_of_width))


_DERIVED = Otherwise.DERIVED
_KV_HEADS = Count("num_key_value_heads", absent=_DERIVED, null=_DERIVED)
_HEAD_DIM = Count("head_dim", absent=_DERIVED, null=_DERIVED)
_ATTENTION_BIAS = Flag("attention_bias", False)
_GPT2 = Reader(
    kv_heads=None,
    head_dim=None,
    width="n_embd",
    depth="n_layer",
    query_heads="n_head",
    weights=WeightRules(
        d_ff=Count("n_inner", absent=_DERIVED, null=_DERIVED),
        ffn_matrices=2,
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
        norm_bias=True,
        positions="n_positions",
        tied=Flag("tie_word_embeddings", True),
    ),
)
_GPT_NEOX = Reader(
    kv_heads=None,
    head_dim=None,
    weights=WeightRules(
        ffn_matrices=2,
        qkv_bias=Flag("attention_bias", True),
        o_bias=Flag("attention_bias", True),
        ffn_bias=True,
        norm_bias=True,
    ),
)

READERS: dict[str, Reader] = {
    "llama": Reader(
        _KV_HEADS,
        _HEAD_DIM,
        weights=WeightRules(
            qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, ffn_bias=Flag("mlp_bias", False)
        ),
    ),
    "mistral": Reader(
        replace(_KV_HEADS, absent=8), _HEAD_DIM, windows=window_everywhere(absent=4096)
    ),
    "qwen2": Reader(
        replace(_KV_HEADS, absent=32),
        _HEAD_DIM,
        windows=window_in_late_layers,
        weights=WeightRules(qkv_bias=True),
    ),
    "qwen3": Reader(
        replace(_KV_HEADS, absent=32),
        Count("head_dim", absent=128),
        windows=window_in_late_layers,
        weights=WeightRules(qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, qk_norm=QKNorm.HEAD),
    ),
    "gemma": Reader(
        Count("num_key_value_heads", absent=16),
        Count("head_dim", absent=256),
        weights=WeightRules(
            qkv_bias=_ATTENTION_BIAS,
            o_bias=_ATTENTION_BIAS,
            tied=Flag("tie_word_embeddings", True),
        ),
    ),
    "phi3": Reader(_KV_HEADS, _HEAD_DIM, windows=window_everywhere(absent=None)),
    "olmo2": Reader(
        _KV_HEADS,
        _HEAD_DIM,
        weights=WeightRules(qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, qk_norm=QKNorm.WIDTH),
    ),
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    # Checkpoints of the two families above after their KV heads were pooled, which transformers'
    # own classes cannot express.
    "kvjax_gpt2": replace(_GPT2, kv_heads=Count("num_key_value_heads")),
    "kvjax_gpt_neox": replace(_GPT_NEOX, kv_heads=Count("num_key_value_heads")),
}


def load(source: ConfigSource) -> ModelSpec:
    """The cache of the model that a Hugging Face config.json describes.

    Args:
        source: a config.json, a directory that has one, or its content as a mapping.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: names the field, what was given and what is accepted.
    """
    config = read_config(source)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in READERS:
        raise ValueError(f"model_type: got {model_type!r}; accepted: {', '.join(READERS)}")
    return READERS[model_type].read(Fields(config, model_type))
