"""Families in which some or all layers see a window or a chunk of the keys."""

from dataclasses import replace

from kvjax.sizing.config import Count
from kvjax.sizing.families.family import FULL, KV_HEADS, SLIDING, Family, full, sizes, sliding
from kvjax.sizing.families.kinds import if_set, late_windows

_ALTERNATIVES = {FULL: full, SLIDING: sliding()}

FAMILIES = {
    "mistral": Family(
        sizes(4096, 32, 32),
        kv_heads=replace(KV_HEADS, absent=8),
        kinds=if_set("sliding_window", absent=4096),
        layers={FULL: full, SLIDING: sliding(absent=4096)},
    ),
    "phi3": Family(sizes(3072, 32, 32), kinds=if_set("sliding_window"), layers=_ALTERNATIVES),
    "qwen2": Family(
        sizes(4096, 32, 32),
        kv_heads=replace(KV_HEADS, absent=32),
        kinds=late_windows(),
        layers={FULL: full, SLIDING: sliding(absent=4096)},
    ),
    "qwen3": Family(
        sizes(4096, 32, 32),
        kv_heads=replace(KV_HEADS, absent=32),
        head_dim=Count("head_dim", absent=128),
        kinds=late_windows(),
        layers={FULL: full, SLIDING: sliding(absent=4096)},
    ),
}
