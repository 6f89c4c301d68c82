"""Parameters beside the attention projections, counted from a config."""

from dataclasses import dataclass
from enum import Enum

from kvjax.sizing.config import Count, Fields, Flag, Otherwise


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


@dataclass(frozen=True)
class Heads:
    """The attention shape that all layers of a plain model have."""

    query_heads: int
    kv_heads: int
    head_dim: int


def count_weights(
    fields: Fields, rules: WeightRules, d_model: int, depth: int, heads: Heads
) -> Weights | None:
    """The parameters of a model of `depth` equal layers.

    Returns:
        None where the config lacks a size that they depend on: the cache can be sized without it.
    """
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
    layer = 2 * norm + _biases(fields, rules, d_model, d_ff, heads) + _qk_norm(rules, heads)
    return Weights(
        ffn=depth * ffn_parameters(d_model, d_ff, rules.ffn_matrices),
        head=tokens,
        lookup=positions + (0 if fields.flag(rules.tied) else tokens),
        small=depth * layer + norm,
    )


def _biases(fields: Fields, rules: WeightRules, d_model: int, d_ff: int, heads: Heads) -> int:
    qkv = (heads.query_heads + 2 * heads.kv_heads) * heads.head_dim
    ffn = (rules.ffn_matrices - 1) * d_ff + d_model
    return (
        fields.flag(rules.qkv_bias) * qkv
        + fields.flag(rules.o_bias) * d_model
        + fields.flag(rules.ffn_bias) * ffn
    )


def _qk_norm(rules: WeightRules, heads: Heads) -> int:
    scales = {
        QKNorm.NONE: 0,
        QKNorm.HEAD: 2,
        QKNorm.WIDTH: heads.query_heads + heads.kv_heads,
    }
    return scales[rules.qk_norm] * heads.head_dim
