"""Parameters beside the attention projections, counted from a config."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvjax.sizing.config import Count, Fields, Flag, Otherwise

if TYPE_CHECKING:
    from kvjax.sizing.layer import LayerSpec
    from kvjax.sizing.spec import ModelSpec


@dataclass(frozen=True)
class Weights:
    """Parameters of a model beside its attention projections, over all layers.

    Attributes:
        ffn: matrices of the feed-forward layers.
        head: the output head; the token table itself where the two are tied.
        lookup: tables of which a step takes single rows: positions, and untied tokens.
        small: norms and biases.
    """

    ffn: int
    head: int
    lookup: int
    small: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.ffn + self.head + self.lookup + self.small


def ffn_parameters(d_model: int, d_ff: int, matrices: int = 3) -> int:
    """Parameters of one feed-forward layer without biases.

    Args:
        d_model: D.
        d_ff: its inner width.
        matrices: 3 for a gated one (SwiGLU, GeGLU), 2 for a plain one.
    """
    return matrices * d_model * d_ff


_D_FF = Count("intermediate_size")
_TIED = Flag("tie_word_embeddings", False)


class QKNorm(Enum):
    """Norms on queries and keys: none, one scale of H for all heads, or scales of all heads."""

    NONE = "none"
    HEAD = "head"
    WIDTH = "width"


@dataclass(frozen=True)
class WeightRules:
    """Which parameters a family has; `Flag`s are decided by a field of the config."""

    d_ff: Count = _D_FF
    ffn_matrices: int = 3
    qkv_bias: bool | Flag = False
    o_bias: bool | Flag = False
    ffn_bias: bool | Flag = False
    norm_bias: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    positions: str | None = None
    tied: Flag = _TIED


_ATTENTION_BIAS = Flag("attention_bias", False)
_NEOX_BIAS = Flag("attention_bias", True)
_GPT2 = WeightRules(
    d_ff=Count("n_inner", absent=Otherwise.DERIVED, null=Otherwise.DERIVED),
    ffn_matrices=2,
    qkv_bias=True,
    o_bias=True,
    ffn_bias=True,
    norm_bias=True,
    positions="n_positions",
    tied=Flag("tie_word_embeddings", True),
)
_GPT_NEOX = WeightRules(
    ffn_matrices=2, qkv_bias=_NEOX_BIAS, o_bias=_NEOX_BIAS, ffn_bias=True, norm_bias=True
)
RULES = {
    "llama": WeightRules(
        qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, ffn_bias=Flag("mlp_bias", False)
    ),
    "mistral": WeightRules(),
    "qwen2": WeightRules(qkv_bias=True),
    "qwen3": WeightRules(qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, qk_norm=QKNorm.HEAD),
    "gemma": WeightRules(
        qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, tied=Flag("tie_word_embeddings", True)
    ),
    "phi3": WeightRules(),
    "olmo2": WeightRules(qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, qk_norm=QKNorm.WIDTH),
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "kvjax_gpt2": _GPT2,
    "kvjax_gpt_neox": _GPT_NEOX,
}


def count_weights(fields: Fields, spec: ModelSpec) -> Weights | None:
    """The parameters of a model beside its attention projections.

    Returns:
        None where they are not known: the family has no rule, or the config lacks a size that they
        depend on. The cache can be sized without it.
    """
    rules = RULES.get(fields.model_type)
    if rules is None:
        return None
    d_model, depth, layer = spec.d_model, len(spec.layers), spec.layers[0]
    needed = ["vocab_size"]
    if rules.positions is not None:
        needed.append(rules.positions)
    if rules.d_ff.absent is Otherwise.REFUSED:
        needed.append(rules.d_ff.name)
    if not all(map(fields.has, needed)):
        return None
    d_ff = fields.count(rules.d_ff, derived=lambda: 4 * d_model)
    tokens = fields.count(Count("vocab_size")) * d_model
    positions = fields.count(Count(rules.positions)) * d_model if rules.positions else 0
    norm = d_model * (1 + rules.norm_bias)
    small = 2 * norm + _biases(fields, rules, d_model, d_ff, layer) + _qk_norm(rules, layer)
    return Weights(
        ffn=depth * ffn_parameters(d_model, d_ff, rules.ffn_matrices),
        head=tokens,
        lookup=positions + (0 if fields.flag(rules.tied) else tokens),
        small=depth * small + norm,
    )


def _biases(fields: Fields, rules: WeightRules, d_model: int, d_ff: int, layer: LayerSpec) -> int:
    qkv = (layer.query_heads + 2 * layer.kv_heads) * layer.key_dim
    ffn = (rules.ffn_matrices - 1) * d_ff + d_model
    return (
        fields.flag(rules.qkv_bias) * qkv
        + fields.flag(rules.o_bias) * d_model
        + fields.flag(rules.ffn_bias) * ffn
    )


def _qk_norm(rules: WeightRules, layer: LayerSpec) -> int:
    scales = {
        QKNorm.NONE: 0,
        QKNorm.HEAD: 2,
        QKNorm.WIDTH: layer.query_heads + layer.kv_heads,
    }
    return scales[rules.qk_norm] * layer.key_dim
