"""Families whose layers keep a latent (MLA) that every query reads whole."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvjax.sizing.config import Count, Fields, Flag
from kvjax.sizing.families import compressed, indexed, mla_mixed
from kvjax.sizing.families.family import (
    FULL,
    Family,
    LayerRule,
    Reader,
    Shape,
    Sizes,
    every,
    full,
    sizes,
)
from kvjax.sizing.families.kinds import layer_types
from kvjax.sizing.families.mla import Mla
from kvjax.sizing.layer import LayerSpec
from kvjax.sizing.spec import ModelSpec

# Heads for multi-token prediction are a model of their own, with its own cache.
_MTP = frozenset({"num_nextn_predict_layers", "num_mtp_layers"})


def _family(width: int, depth: int, query_heads: int, rule: LayerRule | None = None) -> Family:
    """A family with MLA in every layer, by its class's defaults."""
    return Family(
        sizes(width, depth, query_heads),
        kinds=layer_types(every(FULL), FULL),
        layers={FULL: rule or Mla()},
        ignores=_MTP,
    )


_MLA_SIZES = frozenset(
    {"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
)


def _mla_or_heads(fields: Fields, depth: int) -> tuple[str, ...]:
    """DeepSeek-V2: MLA, unless `use_mla` is false (DeepSeek-VL2-Tiny, DeepSeek-OCR)."""
    uses_mla = fields.flag(Flag("use_mla", absent=True))
    if not uses_mla:
        fields.ignore(_MLA_SIZES)
    kind = FULL if uses_mla else _HEADS
    return layer_types(every(kind), kind)(fields, depth)


@dataclass(frozen=True)
class _TwoAttentions:
    """LongCat-Flash: two attentions a layer, both counted by `num_hidden_layers` where given."""

    family: Family

    def read(self, fields: Fields) -> ModelSpec:
        """The model that the config describes."""
        sizes, both = self.family.sizes, fields.number("num_hidden_layers", 0)
        depth = sizes.depth
        if both:
            depth = replace(depth, absent=both // 2, null=both // 2)
            if both != 2 * (layers := fields.count(depth)):
                raise ValueError(
                    f"num_hidden_layers: got {both} with num_layers {layers}; accepted: twice "
                    "num_layers, or absent"
                )
        return replace(self.family, sizes=replace(sizes, depth=depth)).read(fields)


def _both(fields: Fields, shape: Shape) -> tuple[LayerSpec, ...]:
    """Two attentions, each with a latent of its own."""
    layer = Mla()(fields, shape)
    return layer, layer


_HEADS = "heads"
_DEEPSEEK_V3 = _family(7168, 61, 128)
_YOUTU = _family(2048, 32, 16)
_LONGCAT = _TwoAttentions(
    Family(
        Sizes(
            Count("hidden_size", nested=6144),
            Count("num_layers", nested=28),
            Count("num_attention_heads", nested=64),
        ),
        layers={FULL: _both},
        ignores=_MTP,
    )
)

FAMILIES: Mapping[str, Reader] = {
    "axk1": _family(7168, 61, 64),
    "deepseek_v2": replace(
        _family(4096, 32, 32),
        head_dim=None,
        kinds=_mla_or_heads,
        layers={FULL: Mla(), _HEADS: full},
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "glm4_moe_lite": _family(2048, 47, 20, Mla(query=768, nope=192, value=256)),
    # Published with a class of its own that only renames DeepSeek-V3's.
    "kimi_k2": _DEEPSEEK_V3,
    "longcat_flash": _LONGCAT,
    # Its embeddings of n-grams need the last few token ids, which are no records.
    "longcat_flash_ngram": _LONGCAT,
    "minicpm3": _family(2560, 62, 40, Mla(256, rope=32, nope=64, value=None, query=768)),
    "mistral4": _family(4096, 36, 32, Mla(256, nope=64, query=1024)),
    "sarvam_mla": _family(4096, 32, 64, Mla(query=None)),
    "youtu": _YOUTU,
    "youtu_llm": _YOUTU,  # as published
    **indexed.FAMILIES,
    **compressed.FAMILIES,
    **mla_mixed.FAMILIES,
}
