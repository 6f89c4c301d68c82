"""Families that run the same layers more than once for a token, with records of each pass."""

from dataclasses import dataclass, replace

from kvjax.sizing.checks import whole
from kvjax.sizing.config import Count, Fields
from kvjax.sizing.families.family import (
    FULL,
    SLIDING,
    Family,
    Reader,
    checked_depth,
    full,
    sizes,
    sliding,
)
from kvjax.sizing.families.kinds import every_nth, layer_types
from kvjax.sizing.layer import LayerSpec


def _stacks(fields: Fields, depth: int) -> tuple[str, ...]:
    """HRM-Text: `H_cycles` times a high stack, each after `L_cycles` times a low one."""
    high, low = fields.number("H_cycles", 2, 1), fields.number("L_cycles", 3, 1)
    passes = checked_depth("H_cycles, L_cycles", high * (low + 1))
    if not fields.has("num_layers_per_stack"):  # then num_hidden_layers is that of one stack
        return (FULL,) * checked_depth("H_cycles, L_cycles", depth * passes)
    stack = fields.count(Count("num_layers_per_stack"))
    if stack * passes != depth:
        raise ValueError(
            f"num_layers_per_stack: got {stack!r} with num_hidden_layers {depth} and {passes} "
            "passes of a stack; accepted: their quotient"
        )
    return (FULL,) * depth


@dataclass(frozen=True)
class _Sections:
    """How many layers Dory runs once before, several times in, and once after its loop."""

    before: int
    inside: int
    loops: int
    own_records: bool

    @classmethod
    def of(cls, fields: Fields, depth: int, halved: bool) -> "_Sections":
        before, after = (fields.number(f"n_{part}_layers", 8) for part in ("input", "output"))
        given = fields.get("n_recurrent_layers")
        given = None if given is None else whole("n_recurrent_layers", given, 0)
        if halved:
            before, after = before // 2, after // 2
            given = None if given is None else given // 2
        inside = depth - before - after
        if inside < 0 or given not in (None, inside):
            raise ValueError(
                f"n_recurrent_layers: got {given} with {before} input, {after} output and {depth} "
                "layers in all; accepted: the rest of them"
            )
        mode = fields.get("recurrent_kv_cache_mode", "per_loop")
        if mode not in ("per_loop", "last_loop"):
            raise ValueError(
                f"recurrent_kv_cache_mode: got {mode!r}; accepted: per_loop, last_loop"
            )
        return cls(before, inside, fields.number("n_recurrent_loops", 2, 1), mode == "per_loop")


def _sections(fields: Fields) -> _Sections:
    depth = fields.count(Count("num_hidden_layers"))
    blocks = fields.get("layer_types")
    halved = isinstance(blocks, list) and "mlp" in blocks
    return _Sections.of(fields, depth // 2 if halved else depth, halved)


def _dory_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """Dory: the kinds of its layers, and again those of the loop for each further pass.

    A published config lists attention and MLP as layers of their own, in turn.
    """
    blocks = fields.names("layer_types", depth, (FULL, SLIDING, "mlp"))
    if blocks is not None and "mlp" in blocks:
        kinds = blocks[::2]
        if "mlp" in kinds:
            raise ValueError(f"layer_types: got {blocks}; accepted: attention and mlp in turn")
    else:
        kinds = layer_types(every_nth(4))(fields, depth)
    sections = _sections(fields)
    loop = kinds[sections.before : sections.before + sections.inside]
    checked_depth("n_recurrent_loops", max(len(loop), 1) * sections.loops)
    return kinds + loop * (sections.loops - 1)


def _last_pass_kept(fields: Fields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Dory with "last_loop": earlier passes read the records of the last."""
    sections = _sections(fields)
    if sections.own_records:
        return layers
    passes = sections.inside * (sections.loops - 1)
    once = len(layers) - passes
    return layers[:once] + tuple(
        replace(layer, shares_with=sections.before + index % sections.inside)
        for index, layer in enumerate(layers[once:])
    )


FAMILIES: dict[str, Reader] = {
    "dory": Family(
        sizes(2560, 36, 16),
        kv_heads=Count("num_key_value_heads", absent=4),
        head_dim=Count("head_dim", absent=256),
        kinds=_dory_kinds,
        layers={FULL: full, SLIDING: sliding(absent=1024)},
        sharing=_last_pass_kept,
        ignores=frozenset({"sliding_window"}),
    ),
    "hrm_text": Family(
        sizes(1536, 16, 12),
        kv_heads=None,
        head_dim=Count("head_dim", absent=128),
        kinds=_stacks,
    ),
}
