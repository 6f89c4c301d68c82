"""Rules that say of which kind each layer is."""

from collections.abc import Callable

from kvjax.sizing.config import Count, Fields, Flag
from kvjax.sizing.families.family import FULL, SLIDING, Kinds

# Spellings of earlier releases, and what they are called now.
_LEGACY = {
    "mamba": "linear_attention",
    "attention": FULL,
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}


def layer_types(otherwise: Kinds, *accepted: str, name: str = "layer_types") -> Kinds:
    """The kinds that a field names, one for each layer.

    Args:
        otherwise: the rule where the field is absent or null.
        accepted: the kinds that the family has; full and sliding attention if none is given.
        name: the field.
    """
    kinds = accepted or (FULL, SLIDING)
    spellings = (*kinds, *(old for old, new in _LEGACY.items() if new in kinds))

    def read(fields: Fields, depth: int) -> tuple[str, ...]:
        names = fields.names(name, depth, spellings)
        if names is None:
            return otherwise(fields, depth)
        return tuple(_LEGACY.get(kind, kind) for kind in names)

    return read


def every_nth(n: int, common: str = SLIDING, rare: str = FULL, name: str | None = None) -> Kinds:
    """Each n-th layer of kind `rare`, the others `common`; `name` is the field of n, if any."""

    def read(fields: Fields, depth: int) -> tuple[str, ...]:
        step = n if name is None else fields.count(Count(name, absent=n, null=n))
        return tuple(common if (index + 1) % step else rare for index in range(depth))

    return read


def alternating(*kinds: str) -> Kinds:
    """The kinds in turn."""
    return lambda fields, depth: tuple(kinds[index % len(kinds)] for index in range(depth))


def if_set(name: str, then: str = SLIDING, absent: int | None = None) -> Kinds:
    """Kind `then` for all layers where the field is set, else full attention.

    Args:
        name: the field.
        absent: its value where the config lacks it.
    """

    def read(fields: Fields, depth: int) -> tuple[str, ...]:
        kind = FULL if fields.get(name, absent) is None else then
        return (kind,) * depth

    return read


def late_windows(absent_full: int = 28) -> Kinds:
    """Qwen2 and Qwen3: a window from layer `max_window_layers` on, if `use_sliding_window`.

    Args:
        absent_full: `max_window_layers` where the config lacks it.
    """

    def otherwise(fields: Fields, depth: int) -> tuple[str, ...]:
        full_layers = fields.number("max_window_layers", absent_full)
        kind = SLIDING if _window_used(fields) else FULL
        return tuple(kind if index >= full_layers else FULL for index in range(depth))

    def read(fields: Fields, depth: int) -> tuple[str, ...]:
        fields.ignore({"max_window_layers"})
        kinds = (FULL, SLIDING) if _window_used(fields) else (FULL,)
        return layer_types(otherwise, *kinds)(fields, depth)

    return read


def _window_used(fields: Fields) -> bool:
    use = fields.flag(Flag("use_sliding_window", False))
    return fields.get("sliding_window", 4096) is not None and use


def full_where(test: Callable[[int, int], bool], common: str = SLIDING, rare: str = FULL) -> Kinds:
    """Kind `rare` for the layers whose index, with the depth, passes the test."""
    return lambda fields, depth: tuple(
        rare if test(index, depth) else common for index in range(depth)
    )


def if_used(absent: int | None = None) -> Kinds:
    """A window in all layers where `use_sliding_window` is set and `sliding_window` is not null.

    Args:
        absent: `sliding_window` where the config lacks it.
    """

    def read(fields: Fields, depth: int) -> tuple[str, ...]:
        used = fields.flag(Flag("use_sliding_window", False))
        kind = SLIDING if used and fields.get("sliding_window", absent) is not None else FULL
        return (kind,) * depth

    return read


def rotating(fields: Fields, depth: int) -> tuple[bool, ...]:
    """Which layers rotate their queries and keys: by a list, or all but every n-th."""
    given = fields.get("no_rope_layers")
    if not given:
        step = fields.number("no_rope_layer_interval", 4, 1)
        return tuple(bool((index + 1) % step) for index in range(depth))
    if not isinstance(given, list) or len(given) != depth:
        raise ValueError(
            f"no_rope_layers: got {given!r}; accepted: 0 or 1 for each of {depth} layers"
        )
    return tuple(bool(rotates) for rotates in given)
