"""Families in which all layers see a window of the keys, or those from some index on."""

from dataclasses import replace

from kvjax.sizing.config import Fields, Flag
from kvjax.sizing.families.family import FULL, SLIDING, Kinds, Reader, sizes
from kvjax.sizing.families.kinds import if_set, if_used, late_windows, layer_types
from kvjax.sizing.families.rows import fixed_head_dim, fixed_kv_heads, head_dim, kv_heads, windowed


def _late(default: int, window: int | None) -> Kinds:
    """A window from layer `max_window_layers` on, if there is one, without a flag."""

    def otherwise(fields: Fields, depth: int) -> tuple[str, ...]:
        first = fields.number("max_window_layers", default)
        kind = FULL if fields.get("sliding_window", window) is None else SLIDING
        return tuple(kind if index >= first else FULL for index in range(depth))

    return layer_types(otherwise)


def _early_in_turn(fields: Fields, depth: int) -> tuple[str, ...]:
    """Qwen2-MoE: every other layer below `max_window_layers`, if `use_sliding_window`."""
    first_full = fields.number("max_window_layers", 28)
    used = fields.flag(Flag("use_sliding_window", False))
    return tuple(
        SLIDING if used and index % 2 == 0 and index < first_full else FULL
        for index in range(depth)
    )


_LATE = frozenset({"max_window_layers", "use_sliding_window"})
_QWEN2 = windowed(sizes(4096, 32, 32), kv_heads(32), kinds=late_windows(), window=4096)
_QWEN2_VL = windowed(sizes(8192, 80, 64), kv_heads(8), kinds=late_windows(80), window=4096)
_QWEN2_OMNI = windowed(sizes(3584, 28, 28), kv_heads(4), kinds=late_windows(), window=32768)
_PHI3 = windowed(sizes(3072, 32, 32), kinds=if_set("sliding_window"))
_PHI4 = replace(_PHI3, kv_heads=kv_heads(8))

FAMILIES: dict[str, Reader] = {
    # Published with code of their own around Qwen-2: GOT-OCR, dots.ocr and MiMo.
    "GOT": _QWEN2,
    "doge": windowed(sizes(1024, 32, 8), kinds=if_set("sliding_window")),
    "dots_ocr": _QWEN2,
    "dots1": windowed(
        sizes(4608, 62, 32), kv_heads(32), kinds=_late(62, 4096), window=4096, ignores=_LATE
    ),
    "mimo": _QWEN2,
    "ministral": windowed(
        sizes(4096, 32, 32),
        kv_heads(8),
        kinds=layer_types(if_set("sliding_window", absent=4096)),
        window=4096,
    ),
    "ministral3": windowed(
        sizes(4096, 34, 32), kv_heads(8), head_dim(128), kinds=if_set("sliding_window")
    ),
    "mistral": windowed(
        sizes(4096, 32, 32), kv_heads(8), kinds=if_set("sliding_window", absent=4096), window=4096
    ),
    "mixtral": windowed(sizes(4096, 32, 32), kv_heads(8), kinds=if_set("sliding_window")),
    "moshi": windowed(
        sizes(4096, 32, 32), kinds=if_set("sliding_window", absent=3000), window=3000
    ),
    "moshi_depth": windowed(sizes(1024, 6, 16), kinds=if_set("sliding_window", absent=8), window=8),
    "phi3": _PHI3,
    "phi4_multimodal": _PHI4,
    "phi4mm": _PHI4,  # as published, before transformers had it
    "phimoe": windowed(sizes(4096, 32, 32), kv_heads(8), kinds=if_set("sliding_window")),
    "qwen2": _QWEN2,
    "qwen2_5_omni_talker": replace(_QWEN2_OMNI, head_dim=fixed_head_dim(128)),
    "qwen2_5_omni_text": _QWEN2_OMNI,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_moe": windowed(
        sizes(2048, 24, 16),
        fixed_kv_heads(16),
        kinds=layer_types(_early_in_turn),
        window=4096,
        ignores=_LATE,
    ),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3": replace(_QWEN2, head_dim=fixed_head_dim(128)),
    "qwen3_moe": windowed(
        sizes(2048, 24, 32), fixed_kv_heads(4), kinds=if_used(4096), window=4096, ignores=_LATE
    ),
    "qwen3_omni_moe_talker_code_predictor": windowed(
        sizes(1024, 5, 16), kv_heads(8), fixed_head_dim(128), kinds=_late(28, None), ignores=_LATE
    ),
    "qwen3_omni_moe_talker_text": windowed(
        sizes(1024, 20, 16), fixed_kv_heads(2), kinds=if_set("sliding_window"), ignores=_LATE
    ),
    "qwen3_omni_moe_text": windowed(
        sizes(2048, 28, 28), fixed_kv_heads(4), kinds=if_set("sliding_window"), ignores=_LATE
    ),
    "starcoder2": windowed(sizes(3072, 30, 24), fixed_kv_heads(2), kinds=if_set("sliding_window")),
    "voxtral_realtime_text": windowed(
        sizes(4096, 32, 32), kv_heads(8), kinds=if_set("sliding_window", absent=4096), window=4096
    ),
}
