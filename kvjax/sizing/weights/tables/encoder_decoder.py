"""Families with an encoder, of which a decoder without one is a part.

A step reads the decoder alone. Among what it is said to read are the projections of K and V of its
cross-attention, though it needs them for the source only.
"""

from __future__ import annotations

from kvjax.sizing.config import Flag
from kvjax.sizing.weights.figures import Weights, ffn_parameters
from kvjax.sizing.weights.parts import Part, Site, Switch, biases, dense, norms
from kvjax.sizing.weights.rules import TIED, WeightRules


def _with_source(part: Part) -> Part:
    """The part where the decoder attends to an encoder's output."""
    return lambda site: part(site) if any(each.cross for each in site.spec.layers) else Weights()


# --- BART's line


def _positions(offset: int) -> Part:
    """A table of positions, behind `offset` unused ones."""
    return lambda site: Weights(
        lookup=(site.size("max_position_embeddings") + offset) * site.d_model
    )


def _bart_encoder(offset: int | None, extra_norms: int) -> Part:
    """An encoder with layers like the decoder's, without cross-attention.

    Args:
        offset: unused positions before those of its table; None without a table.
        extra_norms: norms before the first and behind the last layer.
    """

    def part(site: Site) -> Weights:
        d_model, width = site.d_model, site.size("encoder_ffn_dim")
        rows = 0 if offset is None else site.size("max_position_embeddings") + offset
        layer = 4 * d_model**2 + ffn_parameters(d_model, width, 2) + width + 9 * d_model
        layers = site.size("encoder_layers")
        return Weights(encoder=layers * layer + (rows + 2 * extra_norms) * d_model)

    return _with_source(part)


def _bart(*, offset: int | None, first_norm: bool, last_norm: bool) -> WeightRules:
    """A family by what it has around its layers.

    Args:
        offset: unused positions before those of its tables; None without tables.
        first_norm: whether embeddings pass a norm.
        last_norm: whether there is one behind the last layer.
    """
    tables = () if offset is None else (_positions(offset),)
    return WeightRules(
        ffn=(dense("decoder_ffn_dim", 2, True),),
        attention=(biases(True, True),),
        norm_bias=True,
        last_norm=last_norm,
        tied=TIED,
        model=(
            *tables,
            norms(int(first_norm), True),
            _bart_encoder(offset, first_norm + last_norm),
        ),
    )


# --- Whisper


def _whisper_biases(site: Site) -> Weights:
    """All projections but those of keys have biases."""
    return Weights(small=2 * site.d_model + site.layer.query_heads * site.layer.key_dim)


def _whisper_encoder(site: Site) -> Weights:
    """Two convolutions over frames, positions, and layers like the decoder's."""
    d_model, width = site.d_model, site.size("encoder_ffn_dim")
    layer = 4 * d_model**2 + ffn_parameters(d_model, width, 2) + width + 8 * d_model
    convolutions = 3 * d_model * (site.number("num_mel_bins", 80) + d_model) + 2 * d_model
    positions = site.number("max_source_positions", 1500) * d_model
    layers = site.size("encoder_layers") * layer
    return Weights(encoder=layers + convolutions + positions + 2 * d_model)


# --- T5


def _t5_matrices(site: Site) -> int:
    """Three where the feed-forward layer is gated."""
    gated = str(site.fields.get("feed_forward_proj", "relu")).startswith("gated")
    return 3 if gated else 2


def _t5_ffn(site: Site) -> Weights:
    return dense("d_ff", _t5_matrices(site))(site)


def _distances(site: Site) -> int:
    """Learned biases for distances between tokens, of one layer."""
    return site.number("relative_attention_num_buckets", 32) * site.layer.query_heads


def _t5_encoder(everywhere: bool) -> Part:
    def part(site: Site) -> Weights:
        d_model, layers = site.d_model, site.size("num_layers")
        inner = site.layer.query_heads * site.layer.key_dim
        ffn = ffn_parameters(d_model, site.size("d_ff"), _t5_matrices(site))
        distances = _distances(site) * (layers if everywhere else 1)
        layer = 4 * d_model * inner + ffn + 2 * d_model
        return Weights(encoder=layers * layer + distances + d_model)

    return _with_source(part)


def _t5(tied: Switch, *, everywhere: bool = False) -> WeightRules:
    """A family; `everywhere` is whether each layer has its own biases for distances."""

    def own_distances(site: Site) -> Weights:
        return Weights(small=_distances(site) * (everywhere or site.index == 0))

    return WeightRules(ffn=(_t5_ffn, own_distances), tied=tied, model=(_t5_encoder(everywhere),))


_BART = _bart(offset=2, first_norm=True, last_norm=False)

RULES = {
    "bart": _BART,
    "blenderbot": _bart(offset=0, first_norm=False, last_norm=True),
    "blenderbot-small": _bart(offset=0, first_norm=True, last_norm=False),
    "m2m_100": _bart(offset=None, first_norm=False, last_norm=True),
    "marian": _bart(offset=0, first_norm=False, last_norm=False),
    "mbart": _bart(offset=2, first_norm=True, last_norm=True),
    "mt5": _t5(TIED),
    "mvp": _BART,
    "pegasus": _bart(offset=0, first_norm=False, last_norm=True),
    "plbart": _BART,
    "t5": _t5(TIED),
    "umt5": _t5(TIED, everywhere=True),
    "whisper": WeightRules(
        ffn=(dense("decoder_ffn_dim", 2, True),),
        attention=(_whisper_biases,),
        norm_bias=True,
        positions="max_target_positions",
        tied=Flag("tie_word_embeddings", True),
        model=(_with_source(_whisper_encoder),),
    ),
}
