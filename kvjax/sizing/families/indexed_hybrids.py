"""Families with linear attention among layers that read only the tokens which an index picks.

Their indexes score blocks of tokens by one key a block. transformers keeps the keys of all tokens
(and, of GLM-5, their gates and a mark of padding) and makes those of the blocks anew each step.
"""

from collections.abc import Mapping
from dataclasses import replace

from kvjax.sizing.config import Count, Fields
from kvjax.sizing.families.family import FULL, LINEAR, Family, Kinds, Reader, Shape, full, sizes
from kvjax.sizing.families.hybrid_kinds import ATTENTION_FIELDS, LATENT_FIELDS, whole_numbers
from kvjax.sizing.families.indexed import INDEXED, PICKS_BY_FREQUENCY, REUSING
from kvjax.sizing.families.kinds import every_nth, layer_types
from kvjax.sizing.families.linear_attention import GatedDelta, Kda
from kvjax.sizing.families.mla import Mla, reuses_picks
from kvjax.sizing.layer import LayerSpec
from kvjax.sizing.states import Pool, State


def _types(otherwise: Kinds) -> Kinds:
    """Linear and indexed layers; "full_attention" of published configs is indexed too."""
    named = layer_types(otherwise, LINEAR, INDEXED, FULL)

    def read(fields: Fields, depth: int) -> tuple[str, ...]:
        return tuple(INDEXED if kind == FULL else kind for kind in named(fields, depth))

    return read


# --- Qwen4-Exp

# A layer whose input takes n-gram embeddings too.
_NGRAMS = "linear_attention with n-grams"


def _qwen4_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """`ple_layer_ids` are the numbers, from 1, of the layers with n-grams."""
    interval = every_nth(4, LINEAR, INDEXED, name="full_attention_interval")
    kinds = _types(interval)(fields, depth)
    numbers = whole_numbers("ple_layer_ids", fields.get("ple_layer_ids") or [])
    for number in sorted(numbers):
        if not 1 <= number <= depth or kinds[number - 1] != LINEAR:
            raise ValueError(
                f"ple_layer_ids: got {number}; accepted: linear_attention layers, from 1 to {depth}"
            )
    return tuple(_NGRAMS if i + 1 in numbers else kind for i, kind in enumerate(kinds))


def _qsa(fields: Fields, shape: Shape) -> LayerSpec:
    """QSA: an index key is the mean of a block's, and a query reads the best blocks' tokens."""
    fields.ignore({"indexer_n_heads", "indexer_kv_heads"})
    width = fields.count(Count("indexer_head_dim"))
    pool = Pool(fields.count(Count("indexer_compress_ratio")), width, gated=False, index=True)
    layer = replace(full(fields, shape), index_top=fields.count(Count("indexer_budget")))
    return replace(layer, pools=(pool,), hf=replace(layer, index_dim=width))


def _with_ngrams(fields: Fields, shape: Shape) -> LayerSpec:
    """A gated delta net, a dilated convolution of n-gram features in all streams, and last ids."""
    layer, n = GatedDelta()(fields, shape), fields.number("ngram_size", 3, 1)
    streams = fields.number("hc_count", 4, 1) * shape.d_model
    inputs = (fields.number("ple_conv_kernel_size", 4, 1) - 1) * n
    conv = (State("conv", streams * inputs),) if inputs else ()
    ids = (State("token ids", n - 1, itemsize=8),) if n > 1 else ()
    return replace(layer, states=(*layer.states, *conv, *ids))


# --- GLM-5 Next

_GLM_KDA = Kda(heads=64)
_GLM_LATENT = Mla(rope=0, nope=256, value=256)


def _glm_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """Each fourth layer is indexed, by an index of its own or by an earlier layer's."""
    kinds = _types(every_nth(4, LINEAR, INDEXED))(fields, depth)
    picks = PICKS_BY_FREQUENCY(fields, depth)
    return tuple(pick if kind == INDEXED else kind for kind, pick in zip(kinds, picks, strict=True))


def _glm_indexed(fields: Fields, shape: Shape) -> LayerSpec:
    """DSA over pools: an index key is a gated mean of a block's."""
    layer = reuses_picks(_GLM_LATENT)(fields, shape)
    assert isinstance(layer, LayerSpec)
    width = fields.count(Count("index_head_dim", absent=128))
    pool = Pool(fields.count(Count("index_kpool", absent=16)), width, index=True)
    return replace(layer, pools=(pool,), hf=replace(layer, index_dim=2 * width + 1))


FAMILIES: Mapping[str, Reader] = {
    "qwen4_exp_text": Family(
        sizes(2048, 40, 16),
        kv_heads=Count("num_key_value_heads", absent=2),
        head_dim=Count("head_dim", absent=256),
        kinds=_qwen4_kinds,
        layers={INDEXED: _qsa, LINEAR: GatedDelta(), _NGRAMS: _with_ngrams},
        ignores=ATTENTION_FIELDS,
    ),
    "glm5_next_text": Family(
        sizes(4096, 45, 64),
        kinds=_glm_kinds,
        layers={INDEXED: _glm_indexed, REUSING: reuses_picks(_GLM_LATENT), LINEAR: _GLM_KDA},
        ignores=LATENT_FIELDS
        | {"index_head_dim", "index_n_heads", "index_topk_pattern", "linear_attn_config"}
        | {"num_nextn_predict_layers"},
    ),
}
