"""Rules of layers that keep a latent (MLA), with an index key beside it where they are sparse."""

from dataclasses import dataclass, replace

from kvjax.sizing.checks import whole
from kvjax.sizing.config import Count, Fields
from kvjax.sizing.families.family import DERIVED, LayerRule, Shape
from kvjax.sizing.layer import LayerSpec

# Fields of other attentions that these configs keep for code shared with them. A layer has one
# latent whatever they say.
_WITHOUT_EFFECT = frozenset({"num_key_value_heads", "head_dim", "qk_head_dim"})


@dataclass(frozen=True)
class Mla:
    """A layer with multi-head latent attention (DeepSeek-AI 2024), from its usual fields.

    Attributes are what the family's class takes where the config lacks the field.

    Attributes:
        latent: L, of `kv_lora_rank`.
        rope: R, of `qk_rope_head_dim`.
        nope: width of a head's keys without rope, of `qk_nope_head_dim`.
        value: HV, of `v_head_dim`; None for D / N.
        query: rank of the query's bottleneck, of `q_lora_rank`; None, as null, for no bottleneck.
    """

    latent: int = 512
    rope: int = 64
    nope: int = 128
    value: int | None = 128
    query: int | None = 1536

    def __call__(self, fields: Fields, shape: Shape) -> LayerSpec:
        """The layer's record: one latent and one rope key, however many heads there are."""
        fields.ignore(_WITHOUT_EFFECT)
        rope = fields.number("qk_rope_head_dim", self.rope)
        query = fields.get("q_lora_rank", self.query)
        value = Count("v_head_dim", absent=self.value or DERIVED, null=self.value or DERIVED)
        return LayerSpec(
            query_heads=shape.query_heads(fields),
            kv_heads=1,
            key_dim=fields.number("qk_nope_head_dim", self.nope) + rope,
            value_dim=fields.count(value, derived=lambda: shape.share_of_width(fields)),
            kind="latent",
            latent_rank=fields.count(Count("kv_lora_rank", absent=self.latent)),
            rope_dim=rope,
            query_rank=None if query is None else whole("q_lora_rank", query),
        )


def indexed(rule: LayerRule, width: int = 128, top: int = 2048) -> LayerRule:
    """A layer that reads only the records an index picks (DSA, DeepSeek-V3.2).

    Its own index key is the same for all index heads, so that their number changes no cache.

    Args:
        rule: the layer's records.
        width: `index_head_dim` where the config lacks it.
        top: `index_topk` where the config lacks it.
    """

    def read(fields: Fields, shape: Shape) -> LayerSpec:
        fields.ignore({"index_n_heads"})
        layer = rule(fields, shape)
        assert isinstance(layer, LayerSpec)
        return replace(
            layer,
            index_dim=fields.count(Count("index_head_dim", absent=width)),
            index_top=fields.count(Count("index_topk", absent=top)),
        )

    return read


def reuses_picks(rule: LayerRule, top: int = 2048) -> LayerRule:
    """A layer that reads the records which the index of an earlier layer picked.

    Args:
        rule: the layer's records.
        top: `index_topk` where the config lacks it.
    """

    def read(fields: Fields, shape: Shape) -> LayerSpec:
        fields.ignore({"index_n_heads", "index_head_dim"})
        layer = rule(fields, shape)
        assert isinstance(layer, LayerSpec)
        return replace(layer, index_top=fields.count(Count("index_topk", absent=top)))

    return read
