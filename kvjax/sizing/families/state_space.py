"""Families with Mamba layers, alone or among layers that attend."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvjax.sizing.config import Count, Fields
from kvjax.sizing.families.family import (
    DERIVED,
    FULL,
    HEAD_DIM,
    KV_HEADS,
    LINEAR,
    Family,
    Reader,
    Shape,
    every,
    full,
    sizes,
)
from kvjax.sizing.families.hybrid_kinds import (
    ATTENTION_FIELDS,
    HYBRID,
    MLP,
    MOE,
    cycled,
    fixed,
    letters,
    listed,
    named_kinds,
    periodic,
)
from kvjax.sizing.families.mamba import Mamba, Mamba2, beside, nothing, only
from kvjax.sizing.layer import LayerSpec
from kvjax.sizing.spec import ModelSpec

# Falcon-Mamba's `expand` is that of other code; its `intermediate_size` counts.
_PLAIN_MAMBA = Mamba(
    expand=Count("expand", absent=2),
    state=Count("state_size", absent=16),
    kernel=Count("conv_kernel", absent=4),
    inner=Count("intermediate_size", absent=DERIVED, null=DERIVED),
)
_JAMBA_MAMBA = Mamba(
    expand=Count("mamba_expand", absent=2),
    state=Count("mamba_d_state", absent=16),
    kernel=Count("mamba_d_conv", absent=4),
)
_BAMBA_MAMBA = Mamba2(
    heads=Count("mamba_n_heads", absent=128),
    head_dim=Count("mamba_d_head"),
    groups=Count("mamba_n_groups", absent=1),
    state=Count("mamba_d_state", absent=256),
    kernel=Count("mamba_d_conv", absent=4),
    expand=Count("mamba_expand", absent=2),
)
_FALCON_H1_MAMBA = replace(_BAMBA_MAMBA, inner=Count("mamba_d_ssm", absent=1024, null=DERIVED))
# The first published configs have the names of Mamba's own code.
_ZAMBA2_MAMBA = Mamba2(
    heads=Count("n_mamba_heads", absent=8),
    head_dim=Count("mamba_headdim"),
    groups=Count("mamba_ngroups", absent=1),
    state=Count("mamba_d_state", absent=64, also=("state_size",)),
    kernel=Count("mamba_d_conv", absent=4, also=("conv_dimension",)),
    expand=Count("mamba_expand", absent=2, also=("expansion_factor",)),
)
_MAMBA2 = Mamba2(
    heads=Count("num_heads", absent=128),
    head_dim=Count("head_dim", absent=64),
    groups=Count("n_groups", absent=8),
    state=Count("state_size", absent=128),
    kernel=Count("conv_kernel", absent=4),
    expand=Count("expand", absent=2),
)
# Its heads need not fill `expand` * D channels, and in the smaller models do not.
_NEMOTRON_MAMBA = Mamba2(
    heads=Count("mamba_num_heads", absent=128),
    head_dim=Count("mamba_head_dim", absent=64),
    groups=Count("n_groups", absent=8, also=("mamba_n_groups",)),
    state=Count("ssm_state_size", absent=128),
    kernel=Count("conv_kernel", absent=4, also=("mamba_d_conv",)),
    expand=None,
)

_WIDE_HEAD = Count("attention_head_dim", absent=DERIVED, null=DERIVED, also=("head_dim",))


def _wide(fields: Fields, shape: Shape) -> LayerSpec:
    """Zamba: the shared attention sees the layer's input beside the model's, 2 D wide."""
    n, k = shape.query_heads(fields), shape.kv_heads(fields)
    h = fields.count(_WIDE_HEAD, derived=lambda: 2 * shape.d_model // n)
    return LayerSpec(n, k, h, h)


def _zamba_kinds(fields: Fields, depth: int) -> tuple[str, ...]:
    """Two Mamba layers and a hybrid one before the period begins."""
    later = periodic(6, 4, HYBRID)(fields, max(depth - 3, 0))
    return (LINEAR, LINEAR, HYBRID, *later)[:depth]


_ZAMBA2_KINDS = fixed(
    *(LINEAR,),
    *((LINEAR,) * 5 + (HYBRID,)) * 7,
    *(LINEAR,) * 4 + (HYBRID,),
    *(LINEAR,) * 3 + (HYBRID,),
    *(LINEAR,) * 2,
    name="layers_block_type",
)

_NEMOTRON_KINDS = named_kinds(
    letters(
        "hybrid_override_pattern",
        {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE},
        cycled(LINEAR, MOE, FULL, MLP),
    ),
    LINEAR,
    FULL,
    MLP,
    MOE,
)


@dataclass(frozen=True)
class Listed:
    """A family whose configs may list the kinds of layers and not say how many there are.

    Attributes:
        family: the family.
        lists: the fields that list them, the first that is set counts.
        otherwise: the number of layers where none is set.
    """

    family: Family
    lists: tuple[str, ...]
    otherwise: int

    def read(self, fields: Fields) -> ModelSpec:
        """The model that the config describes."""
        fields.ignore(self.lists)
        given = (fields.get(name) for name in self.lists)
        kinds = next((value for value in given if isinstance(value, list | str)), None)
        depth = self.otherwise if kinds is None else len(kinds)
        counted = replace(self.family.sizes.depth, absent=depth, null=depth)
        return replace(self.family, sizes=replace(self.family.sizes, depth=counted)).read(fields)


_K8 = replace(KV_HEADS, absent=8)
_ATTENTION_OR_MAMBA2 = {FULL: full, LINEAR: only(_BAMBA_MAMBA)}
# Names that Mamba's own code gave to D and the number of layers, beside transformers' own.
_MAMBA = Family(
    sizes(768, 32, 1),
    kinds=every(LINEAR),
    layers={LINEAR: only(_PLAIN_MAMBA)},
    ignores=frozenset({"d_model", "n_layer"}),
)

FAMILIES: Mapping[str, Reader] = {
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "mamba2": Family(
        sizes(4096, 64, 1),
        kinds=every(LINEAR),
        layers={LINEAR: only(_MAMBA2)},
        ignores=frozenset({"d_model", "n_layer"}),
    ),
    "jamba": Family(
        sizes(4096, 32, 32),
        kv_heads=_K8,
        kinds=periodic(8, 4),
        layers={FULL: full, LINEAR: only(_JAMBA_MAMBA)},
        ignores=ATTENTION_FIELDS | {"layers_block_type", "layer_types"},
    ),
    "bamba": Family(
        sizes(4096, 32, 32),
        kv_heads=_K8,
        kinds=listed("attn_layer_indices", FULL, LINEAR, every(LINEAR)),
        layers=_ATTENTION_OR_MAMBA2,
        ignores=ATTENTION_FIELDS | {"layers_block_type", "layer_types"},
    ),
    "granitemoehybrid": Family(
        sizes(4096, 32, 32),
        kinds=named_kinds(every(LINEAR), LINEAR, FULL),
        layers=_ATTENTION_OR_MAMBA2,
        ignores=ATTENTION_FIELDS,
    ),
    "falcon_h1": Family(
        sizes(4096, 32, 32),
        kv_heads=_K8,
        kinds=every(HYBRID),
        layers={HYBRID: beside(full, _FALCON_H1_MAMBA)},
        ignores=ATTENTION_FIELDS | {"layers_block_type", "layer_types"},
    ),
    "zamba": Family(
        sizes(3712, 76, 16),
        kv_heads=Count("num_key_value_heads", absent=16),
        kinds=named_kinds(_zamba_kinds, LINEAR, HYBRID),
        layers={LINEAR: only(_JAMBA_MAMBA), HYBRID: beside(_wide, _JAMBA_MAMBA)},
        ignores=ATTENTION_FIELDS | {"attention_head_dim", "attn_layer_period"},
    ),
    "zamba2": Family(
        sizes(2560, 54, 32),
        kinds=named_kinds(_ZAMBA2_KINDS, LINEAR, HYBRID),
        layers={LINEAR: only(_ZAMBA2_MAMBA), HYBRID: beside(_wide, _ZAMBA2_MAMBA)},
        ignores=ATTENTION_FIELDS | {"attention_head_dim", "kv_channels", "num_query_groups"},
    ),
    "nemotron_h": Listed(
        Family(
            sizes(4096, 4, 32),
            kv_heads=_K8,
            head_dim=replace(HEAD_DIM, absent=128, also=("attention_head_dim",)),
            kinds=_NEMOTRON_KINDS,
            layers={
                FULL: full,
                LINEAR: only(_NEMOTRON_MAMBA),
                MLP: nothing,
                MOE: nothing,
            },
            ignores=ATTENTION_FIELDS
            | {"attention_head_dim", "num_nextn_predict_layers", "sliding_window"},
        ),
        lists=("layers_block_type", "layer_types", "hybrid_override_pattern"),
        otherwise=4,
    ),
}
