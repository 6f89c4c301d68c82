"""Families in which every layer attends to all keys with K and V of one width."""

from dataclasses import replace

from kvjax.sizing.config import Count, Fields
from kvjax.sizing.families.family import (
    FULL,
    HEAD_DIM,
    Family,
    Kinds,
    Reader,
    Shape,
    full,
    sizes,
)
from kvjax.sizing.families.rows import fixed_head_dim, fixed_kv_heads, head_dim, kv_heads
from kvjax.sizing.layer import LayerSpec


def _cross_at(default: tuple[int, ...]) -> Kinds:
    """Mllama: layers at some indices attend to the image alone, the others to the text alone."""

    def kinds(fields: Fields, depth: int) -> tuple[str, ...]:
        given = fields.get("cross_attention_layers")
        chosen = [index for index in default if index < depth] if given is None else given
        if not isinstance(chosen, list) or not all(
            isinstance(i, int) and 0 <= i < depth for i in chosen
        ):
            raise ValueError(
                f"cross_attention_layers: got {chosen!r}; accepted: a list of indices below {depth}"
            )
        return tuple("cross_attention" if index in chosen else FULL for index in range(depth))

    return kinds


def _prompted(fields: Fields, shape: Shape) -> LayerSpec:
    """CPM-Ant: `prompt_length` learned tokens stand before the sequence."""
    return replace(full(fields, shape), prompt=fields.number("prompt_length", 32))


def _rounded_down(fields: Fields, shape: Shape) -> LayerSpec:
    """GLM-4 MoE: the class's own default, 96 heads in a width of 4096, leaves a remainder."""
    n, k = shape.query_heads(fields), shape.kv_heads(fields)
    h = fields.count(HEAD_DIM, derived=lambda: shape.d_model // n)
    return LayerSpec(n, k, h, h)


def _cross(fields: Fields, shape: Shape) -> LayerSpec:
    return replace(full(fields, shape), cross=True)


_LLAMA = Family(sizes(4096, 32, 32))
# PaliGemma sees its image and prompt both ways, which changes no record.
_PREFIX = frozenset({"use_bidirectional_attention"})
# Layers that predict tokens beyond the next are not run by generation.
_MTP = frozenset({"num_nextn_predict_layers"})
_GLM4 = Family(sizes(4096, 40, 32), fixed_kv_heads(2), fixed_head_dim(128))
_GLM4V = Family(sizes(4096, 40, 32), kv_heads(2), head_dim=None)
_GLM4_MOE = Family(
    sizes(4096, 46, 96), fixed_kv_heads(8), layers={FULL: _rounded_down}, ignores=_MTP
)

# Hunyuan's published configs describe the latents of MLA even where `use_mla` is false.
UNUSED_LATENT = frozenset(
    {"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
)
_HUNYUAN = replace(
    _LLAMA, head_dim=replace(HEAD_DIM, also=("attention_head_dim",)), ignores=UNUSED_LATENT
)

FAMILIES: dict[str, Reader] = {
    "apertus": _LLAMA,
    "apertus1p5_text": _LLAMA,
    "arcee": Family(sizes(2560, 32, 32)),
    "aria_text": _LLAMA,
    "biogpt": Family(sizes(1024, 24, 16), kv_heads=None, head_dim=None),
    "bitnet": Family(sizes(2560, 30, 20), kv_heads(5)),
    "chameleon": Family(sizes(4096, 32, 32), fixed_kv_heads(32), head_dim=None),
    "cohere": Family(sizes(8192, 40, 64)),
    "cosmos3_edge_text": Family(sizes(2048, 28, 16), kv_heads(8), head_dim(128)),
    "cpmant": Family(
        sizes(4096, 48, 32),
        kv_heads=None,
        head_dim=Count("dim_head", absent=128),
        layers={FULL: _prompted},
    ),
    "csm": Family(sizes(2048, 16, 32), kv_heads(8)),
    "csm_depth_decoder_model": Family(sizes(1024, 4, 8), kv_heads(2)),
    "deepseek_ocr2_text": _LLAMA,
    "diffllama": Family(sizes(2048, 16, 32)),
    "emu3_text_model": Family(sizes(4096, 32, 32), fixed_kv_heads(8)),
    "ernie4_5": Family(sizes(1024, 18, 16), kv_heads(2), head_dim(128)),
    "ernie4_5_moe": Family(sizes(2560, 28, 20), fixed_kv_heads(4), ignores=_MTP),
    "ernie4_5_vl_moe_text": Family(sizes(2560, 28, 20), fixed_kv_heads(4)),
    "exaone": Family(
        sizes(4096, 32, 32, ("hidden_size", "num_layers", "num_attention_heads")), kv_heads(8)
    ),
    "flex_olmo": _LLAMA,
    "gemma": Family(sizes(3072, 28, 16), fixed_kv_heads(16), fixed_head_dim(256), ignores=_PREFIX),
    "git": Family(sizes(768, 6, 12), kv_heads=None, head_dim=None),
    "glm": _GLM4,
    "glm4": _GLM4,
    "glm4_moe": _GLM4_MOE,
    "glm4v_moe_text": _GLM4_MOE,
    "glm4v_text": _GLM4V,
    "glm_image_text": _GLM4V,
    "glm_ocr_text": Family(sizes(1024, 16, 16), kv_heads(8)),
    "granite": _LLAMA,
    "granite4_vision_text": _LLAMA,
    "granite_docling_text": Family(sizes(1024, 28, 16), kv_heads(4)),
    "granitemoe": _LLAMA,
    "granitemoeshared": _LLAMA,
    "helium": Family(sizes(2560, 24, 20), fixed_kv_heads(20), fixed_head_dim(128)),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "hunyuan_vl_text": _HUNYUAN,
    "hy_v3": Family(sizes(4096, 80, 64), fixed_kv_heads(8), fixed_head_dim(128), ignores=_MTP),
    "hyperclovax": _LLAMA,
    "internlm3": Family(sizes(4096, 48, 32), kv_heads(2), head_dim(128)),
    # It inherits two fields of Qwen, the first of which must be false.
    "iquestcoder": Family(
        sizes(5120, 80, 40),
        kv_heads(8),
        head_dim(128),
        ignores=frozenset({"max_window_layers"}),
    ),
    "jais2": Family(sizes(3328, 32, 26)),
    # Draft models (EAGLE-3) keep from Qwen where its windows began, and have none.
    "llama": replace(_LLAMA, ignores=frozenset({"max_window_layers"})),
    "minimax_m2": Family(sizes(3072, 62, 48), fixed_kv_heads(8), fixed_head_dim(128)),
    "mllama_text_model": Family(
        sizes(4096, 40, 32),
        fixed_kv_heads(8),
        head_dim=None,
        kinds=_cross_at((3, 8, 13, 18, 23, 28, 33, 38)),
        layers={FULL: full, "cross_attention": _cross},
    ),
    "molmo2_text": Family(sizes(4096, 36, 32), fixed_kv_heads(8), fixed_head_dim(128)),
    "nanochat": Family(sizes(768, 12, 6)),
    "nemotron": Family(sizes(6144, 32, 48)),
    "olmo": _LLAMA,
    "olmo2": _LLAMA,
    "olmoe": Family(sizes(2048, 16, 16)),
    "opt": Family(sizes(768, 12, 12), kv_heads=None, head_dim=None),
    "paddleocr_vl_text": Family(sizes(1024, 18, 16), kv_heads(2), head_dim(128)),
    "persimmon": Family(sizes(4096, 36, 64), kv_heads=None, head_dim=None),
    "phi": Family(sizes(2048, 24, 32)),
    "qwen3_vl_moe_text": Family(sizes(2048, 24, 16), kv_heads(16)),
    "qwen3_vl_text": Family(sizes(4096, 32, 32), kv_heads(32), fixed_head_dim(128)),
    "sarvam_moe": Family(sizes(4096, 19, 64), fixed_kv_heads(4), fixed_head_dim(64), ignores=_MTP),
    "seed_oss": Family(sizes(4096, 64, 80), kv_heads(8), head_dim(128)),
    "solar_open": Family(sizes(4096, 48, 64), fixed_kv_heads(8), fixed_head_dim(128), ignores=_MTP),
    "stablelm": Family(sizes(2560, 32, 32), fixed_kv_heads(32), head_dim=None),
}
