"""Rules that say which layers of a hybrid keep a state, and the names of their kinds."""

from collections.abc import Mapping

from kvjax.sizing.config import Fields
from kvjax.sizing.families.family import FULL, LINEAR, Kinds
from kvjax.sizing.families.kinds import layer_types

# Attention and a state in one layer.
HYBRID, HYBRID_SLIDING = "hybrid", "hybrid_sliding"
# Attention to the records that an index picks.
INDEXED = "indexed_attention"
# A short convolution and nothing else.
CONV = "conv"
# Feed-forward layers that are listed as layers of their own and keep nothing.
MLP, MOE = "mlp", "moe"

# What attention layers read. The configs of hybrids have it whether any layer attends or not.
ATTENTION_FIELDS = frozenset({"num_attention_heads", "num_key_value_heads", "head_dim"})
LATENT_FIELDS = ATTENTION_FIELDS | {
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
}


def named_kinds(otherwise: Kinds, *accepted: str) -> Kinds:
    """The kinds that `layer_types` names, or its earlier spelling `layers_block_type`.

    Args:
        otherwise: the rule where both are absent or null.
        accepted: the kinds that the family has.
    """
    earlier = layer_types(otherwise, *accepted, name="layers_block_type")
    later = layer_types(earlier, *accepted)

    def read(fields: Fields, depth: int) -> tuple[str, ...]:
        fields.ignore({"layers_block_type"})
        return later(fields, depth)

    return read


def listed(name: str, there: str, elsewhere: str, otherwise: Kinds) -> Kinds:
    """Kind `there` for the layers whose indices a field lists, `elsewhere` for the others.

    Args:
        name: the field; indices from 0, of which those past the last layer do not matter.
        there, elsewhere: the kinds.
        otherwise: the rule where the field is absent or null.
    """

    def read(fields: Fields, depth: int) -> tuple[str, ...]:
        value = fields.get(name)
        if value is None:
            return otherwise(fields, depth)
        indices = whole_numbers(name, value)
        return tuple(there if index in indices else elsewhere for index in range(depth))

    return read


def periodic(period: int, offset: int, there: str = FULL, elsewhere: str = LINEAR) -> Kinds:
    """Kind `there` for layers with index % `attn_layer_period` == `attn_layer_offset` (Jamba).

    Args:
        period, offset: taken where the config lacks the fields.
        there, elsewhere: the kinds.
    """

    def read(fields: Fields, depth: int) -> tuple[str, ...]:
        step = fields.number("attn_layer_period", period, 1)
        first = fields.number("attn_layer_offset", offset)
        if first >= step:
            raise ValueError(
                f"attn_layer_offset: got {first}; accepted: less than attn_layer_period {step}"
            )
        return tuple(there if index % step == first else elsewhere for index in range(depth))

    return read


def cycled(*pattern: str) -> Kinds:
    """The kinds in turn, from the first again after the last."""
    return lambda fields, depth: tuple(pattern[index % len(pattern)] for index in range(depth))


def fixed(*kinds: str, name: str = "layer_types") -> Kinds:
    """Just these kinds, whatever the config says; `name` is the field that would say otherwise."""

    def read(fields: Fields, depth: int) -> tuple[str, ...]:
        if depth != len(kinds):
            raise ValueError(
                f"{name}: absent with {depth} layers; accepted for {fields.model_type}: a list, "
                f"or {len(kinds)} layers, whose kinds are known"
            )
        return kinds

    return read


def letters(name: str, alphabet: Mapping[str, str], otherwise: Kinds) -> Kinds:
    """The kinds that a field spells with one letter a layer, such as "M-M*" (Nemotron-H).

    Args:
        name: the field.
        alphabet: the kind that each letter stands for.
        otherwise: the rule where the field is absent or null.
    """

    def read(fields: Fields, depth: int) -> tuple[str, ...]:
        pattern = fields.get(name)
        if pattern is None:
            return otherwise(fields, depth)
        if not isinstance(pattern, str) or len(pattern) != depth:
            given = f"{len(pattern)} letters" if isinstance(pattern, str) else repr(pattern)
            raise ValueError(f"{name}: got {given}; accepted: one for each of {depth} layers")
        unknown = sorted(set(pattern) - set(alphabet))
        if unknown:
            raise ValueError(
                f"{name}: got the letters {', '.join(map(repr, unknown))}; accepted for "
                f"{fields.model_type}: {', '.join(alphabet)}"
            )
        return tuple(alphabet[letter] for letter in pattern)

    return read


def whole_numbers(name: str, value: object) -> frozenset[int]:
    """The numbers of a list in a config.

    Raises:
        ValueError: names the field.
    """
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        raise ValueError(f"{name}: got {value!r}; accepted: a list of whole numbers")
    return frozenset(value)
