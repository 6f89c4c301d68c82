"""Families whose layers see a window or all keys, in a pattern."""

from kvjax.sizing.config import Fields
from kvjax.sizing.families.family import (
    FULL,
    SLIDING,
    Reader,
    every,
    sizes,
)
from kvjax.sizing.families.kinds import alternating, every_nth, full_where, layer_types, rotating
from kvjax.sizing.families.rows import (
    fixed_head_dim,
    fixed_kv_heads,
    head_dim,
    kv_heads,
    windowed,
)


def _after_dense(fields: Fields, depth: int) -> tuple[str, ...]:
    """Cohere-2 MoE: the first layers, without experts, have a pattern of their own."""
    dense = fields.number("first_k_dense_replace", 0)
    if dense > depth:
        raise ValueError(f"first_k_dense_replace: got {dense}; accepted: at most {depth}")
    first = every_nth(1, name="prefix_dense_sliding_window_pattern")(fields, dense)
    return first + every_nth(4, name="sliding_window_pattern")(fields, depth - dense)


def _if_windowed(fields: Fields, depth: int) -> tuple[str, ...]:
    """EXAONE-4: windows in a pattern, unless there is no window.

    A published pattern is a string of L (local) and G (global); the last layer is global then.
    """
    if fields.get("sliding_window", 4096) is None:
        return (FULL,) * depth
    pattern = fields.get("sliding_window_pattern")
    if not isinstance(pattern, str):
        return every_nth(4, name="sliding_window_pattern")(fields, depth)
    if not pattern or not set(pattern) <= {"L", "G"}:
        raise ValueError(
            f"sliding_window_pattern: got {pattern!r}; accepted: a number, or L and G in turn"
        )
    local = [pattern[index % len(pattern)] == "L" for index in range(depth - 1)]
    return (*(SLIDING if windowed else FULL for windowed in local), FULL)


def _windows_without_rope(fields: Fields, depth: int) -> tuple[str, ...]:
    """SmolLM3: the layers that do not rotate have a window, if one is used."""
    rotates = rotating(fields, depth)
    used = fields.get("use_sliding_window", False) and fields.get("sliding_window") is not None
    return tuple(SLIDING if used and not rotate else FULL for rotate in rotates)


_FULL_FIRST = full_where(lambda index, _: index % 4 == 0)
_FULL_LAST = full_where(lambda index, depth: (depth - 1 - index) % 4 == 0)
_BY_LIST = layer_types(every(FULL))
_EXAONE4 = windowed(
    sizes(4096, 32, 32),
    fixed_kv_heads(32),
    kinds=layer_types(_if_windowed),
    window=4096,
    ignores=frozenset({"sliding_window_pattern"}),
)

FAMILIES: dict[str, Reader] = {
    "afmoe": windowed(
        sizes(2048, 32, 16),
        dim=fixed_head_dim(128),
        kinds=layer_types(every_nth(4, name="global_attn_every_n_layers")),
        window=1024,
    ),
    "beam": windowed(
        sizes(5120, 52, 48),
        fixed_kv_heads(8),
        fixed_head_dim(128),
        kinds=layer_types(full_where(lambda i, depth: (i + 1) % 6 == 0 or i == depth - 1)),
        window=512,
    ),
    "cohere2": windowed(
        sizes(8192, 40, 64),
        kinds=layer_types(every_nth(4, name="sliding_window_pattern")),
        window=4096,
        ignores=frozenset({"sliding_window_pattern"}),
    ),
    "cohere2_moe": windowed(
        sizes(8192, 40, 64),
        dim=fixed_head_dim(128),
        kinds=layer_types(_after_dense),
        window=4096,
        ignores=frozenset({"sliding_window_pattern"}),
    ),
    "cohere_compass_text": windowed(
        sizes(8192, 40, 64),
        kinds=_BY_LIST,
        window=4096,
        ignores=frozenset({"sliding_window_pattern"}),
    ),
    "cwm": windowed(
        sizes(6144, 64, 48), kv_heads(8), head_dim(128), kinds=layer_types(_FULL_FIRST), window=8192
    ),
    "exaone4": _EXAONE4,
    "exaone_moe": _EXAONE4,
    "flint": windowed(
        sizes(2048, 49, 32),
        fixed_kv_heads(4),
        fixed_head_dim(128),
        kinds=layer_types(full_where(lambda i, depth: i < 2 or i % 4 == 1 or i == depth - 1)),
        window=513,
    ),
    "gpt_oss": windowed(
        sizes(2880, 36, 64),
        kv_heads(8),
        head_dim(64),
        kinds=layer_types(alternating(SLIDING, FULL)),
        window=128,
    ),
    "granite_swa": windowed(
        sizes(2560, 24, 20), kv_heads(4), kinds=layer_types(_FULL_FIRST), window=128
    ),
    "granitemoe_swa": windowed(sizes(4096, 32, 32), kinds=layer_types(_FULL_FIRST), window=128),
    "kolibri1": windowed(
        sizes(2560, 50, 48),
        fixed_kv_heads(4),
        fixed_head_dim(128),
        kinds=layer_types(every_nth(5)),
        window=513,
    ),
    "mellum": windowed(
        sizes(2304, 28, 32),
        fixed_kv_heads(4),
        fixed_head_dim(128),
        kinds=_BY_LIST,
        window=1024,
    ),
    "muse_glimmer_text": windowed(
        sizes(6656, 52, 32),
        fixed_kv_heads(2),
        fixed_head_dim(128),
        kinds=layer_types(_FULL_LAST),
        window=2048,
    ),
    "muse_spark_text": windowed(
        sizes(8192, 62, 128),
        fixed_kv_heads(16),
        fixed_head_dim(64),
        kinds=layer_types(_FULL_LAST),
        window=2048,
    ),
    "olmo3": windowed(sizes(4096, 32, 32), kinds=layer_types(every_nth(4)), window=4096),
    "smollm3": windowed(
        sizes(2048, 36, 16),
        kv_heads(4),
        kinds=layer_types(_windows_without_rope),
        ignores=frozenset({"use_sliding_window", "max_window_layers"}),
    ),
}
