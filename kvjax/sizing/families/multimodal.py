"""Decoders of multimodal models whose sizes lie at the top of the config, beside an encoder's part.

The encoder's part is not read.
"""

from dataclasses import replace

from kvjax.sizing.cache_fields import CACHE_FIELDS
from kvjax.sizing.config import Count, Fields
from kvjax.sizing.families import gemma
from kvjax.sizing.families.encoder_decoder import always, source_layer, with_source
from kvjax.sizing.families.family import (
    FULL,
    HEAD_DIM,
    KV_HEADS,
    SLIDING,
    Family,
    Reader,
    Shape,
    Sizes,
    full,
    own_records,
    sizes,
    sliding,
)
from kvjax.sizing.families.kinds import if_set
from kvjax.sizing.layer import LayerSpec, state_layer

_GEMMA4 = gemma.FAMILIES["gemma4_text"]
assert isinstance(_GEMMA4, Family)
GATED = "gated_attention"


def _gated_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """Idefics: gated attention to the images before each `cross_layer_interval`-th layer."""
    step = fields.count(Count("cross_layer_interval", absent=1))
    return tuple(FULL if index % step else GATED for index in range(depth))


def _gated(fields: Fields, shape: Shape) -> tuple[LayerSpec, LayerSpec]:
    """Keys and values of images never change; transformers makes them anew in each step."""
    own = full(fields, shape)
    return replace(source_layer(own), hf=state_layer()), own


def _wide(fields: Fields, shape: Shape) -> LayerSpec:
    """DiffusionGemma: as Gemma-4, with a number of KV heads of its own wherever it is given."""
    layer = full(fields, shape)
    fields.ignore({"global_head_dim", "num_global_key_value_heads"})
    if fields.get("per_layer_config", ...) is not ...:
        return layer
    dim, kept = Count("global_head_dim", absent=512), layer.kv_heads
    kept = fields.count(Count("num_global_key_value_heads", absent=kept, null=kept))
    return LayerSpec(layer.query_heads, kept, fields.count(dim), fields.count(dim))


def _nothing(fields: Fields, shape: Shape) -> LayerSpec:
    """A draft model that reads the cache of the model it drafts for, and keeps none."""
    return state_layer()


_MINICPMV = Family(sizes(4096, 32, 32), ignores=frozenset({"max_window_layers", "sliding_window"}))

FAMILIES: dict[str, Reader] = {
    "blip_text_model": Family(
        sizes(768, 12, 8),
        kv_heads=None,
        head_dim=None,
        layers={FULL: with_source(attends=always)},
    ),
    "diffusion_gemma_text": replace(
        _GEMMA4, layers={**_GEMMA4.layers, FULL: _wide}, sharing=own_records
    ),
    "evolla": Family(sizes(4096, 32, 32), kv_heads=Count("num_key_value_heads", absent=8)),
    "gemma4_assistant_text": Family(
        sizes(2304, 30, 8), layers={FULL: _nothing}, ignores=CACHE_FIELDS
    ),
    "gradium_phonon_tts": Family(sizes(768, 6, 12)),
    "higgs_audio_v2": Family(
        sizes(3072, 28, 24),
        kv_heads=replace(KV_HEADS, absent=8),
        head_dim=replace(HEAD_DIM, absent=128),
    ),
    "idefics": Family(
        sizes(4096, 32, 32),
        kv_heads=None,
        head_dim=None,
        kinds=_gated_kinds,
        layers={FULL: full, GATED: _gated},
    ),
    "kyutai_speech_to_text": Family(
        sizes(2048, 48, 32),
        kinds=if_set("sliding_window", absent=375),
        layers={FULL: full, SLIDING: sliding(absent=375)},
    ),
    # Code of their own, around decoders of Qwen-2's kind or Llama's. MolmoE has OLMo's spellings.
    "ernie4_5_moe_vl": Family(sizes(2560, 28, 20)),
    "minicpmo": _MINICPMV,
    "minicpmv": _MINICPMV,
    "molmo": Family(
        Sizes(
            Count("hidden_size", also=("d_model",)),
            Count("num_hidden_layers", also=("n_layers",)),
            Count("num_attention_heads", also=("n_heads",)),
        ),
        kv_heads=replace(KV_HEADS, also=("n_kv_heads",)),
    ),
    "pocket_tts": Family(sizes(1024, 6, 16)),
    # It keeps the prompt whole, and of what is generated a window: exact for the prompt and as many
    # tokens as the window has, and more than is kept after that.
    "unlimited_ocr_text": Family(
        sizes(1280, 12, 10),
        kv_heads=replace(KV_HEADS, absent=10),
        head_dim=None,
        ignores=frozenset({"head_dim", "layer_types", "sliding_window"}),
    ),
}
