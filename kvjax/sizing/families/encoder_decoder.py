"""Families whose decoder layers also attend to an encoder's output.

A decoder layer is two `LayerSpec`s: its self-attention, which grows with the sequence, and its
cross-attention, whose records are made once of the source: the encoder's output, in a speech model
its frames. A decoder that is loaded without its encoder (`is_encoder_decoder: false`) has the first
alone.
"""

from collections.abc import Callable
from dataclasses import replace

from kvjax.sizing.config import Count, Fields, Flag
from kvjax.sizing.families.family import (
    FULL,
    HEAD_DIM,
    KV_HEADS,
    SLIDING,
    Family,
    LayerRule,
    Reader,
    Shape,
    Sizes,
    checked_depth,
    full,
    sizes,
    sliding,
)
from kvjax.sizing.families.kinds import Kinds, alternating, every_nth, layer_types
from kvjax.sizing.layer import LayerSpec

# Whether the decoder attends to a source, by its config.
type Attends = Callable[[Fields], bool]


def if_encoder_decoder(absent: bool = True) -> Attends:
    """If `is_encoder_decoder` (`absent` where it is not given) or `add_cross_attention`."""

    def attends(fields: Fields) -> bool:
        added = fields.flag(Flag("add_cross_attention", False))
        return fields.flag(Flag("is_encoder_decoder", absent)) or added

    return attends


def _prophetnet_attends(fields: Fields) -> bool:
    """Its class has the cross-attention unless `add_cross_attention` says otherwise."""
    with_encoder = fields.flag(Flag("is_encoder_decoder", True))
    return fields.flag(Flag("add_cross_attention", with_encoder))


def always(fields: Fields) -> bool:
    """The family is a part of models with an encoder and of no others."""
    fields.ignore({"is_encoder_decoder", "add_cross_attention"})
    return True


def with_source(rule: LayerRule = full, attends: Attends | None = None) -> LayerRule:
    """A layer's self-attention by `rule`, and the same heads over the source.

    Args:
        rule: the self-attention.
        attends: whether there is a source; `if_encoder_decoder()` if None.
    """
    has_source = attends or if_encoder_decoder()

    def pair(fields: Fields, shape: Shape) -> LayerSpec | tuple[LayerSpec, ...]:
        own = rule(fields, shape)
        assert isinstance(own, LayerSpec)
        return (own, source_layer(own)) if has_source(fields) else own

    return pair


def source_layer(own: LayerSpec) -> LayerSpec:
    """The cross-attention beside a self-attention, with the same heads and no window."""
    return LayerSpec(own.query_heads, own.kv_heads, own.key_dim, own.value_dim, cross=True)


def _bart(width: int, depth: int, heads: int, attends: Attends | None = None) -> Family:
    """The decoder's own sizes; `num_hidden_layers` and `num_attention_heads` are the encoder's."""
    return Family(
        Sizes(
            Count("d_model", also=("hidden_size",), nested=width),
            Count("decoder_layers", nested=depth),
            Count("decoder_attention_heads", nested=heads),
        ),
        kv_heads=None,
        head_dim=None,
        layers={FULL: with_source(attends=attends)},
        ignores=frozenset({"num_hidden_layers", "num_attention_heads"}),
    )


def _decoder_depth(absent: int | None = None) -> Kinds:
    """T5: `num_decoder_layers`, and as many as the encoder has where it is null.

    Args:
        absent: its value where the config lacks it; None for the encoder's.
    """

    def kinds(fields: Fields, depth: int) -> tuple[str, ...]:
        rule = Count("num_decoder_layers", absent=absent or depth, null=depth)
        return (FULL,) * checked_depth(rule.name, fields.count(rule))

    return kinds


def _t5(width: int, depth: int, heads: int, decoder_depth: int | None = None) -> Family:
    """Heads are `d_kv` wide whatever the width."""
    names = ("d_model", "num_layers", "num_heads")
    return Family(
        sizes(width, depth, heads, names),
        kv_heads=None,
        head_dim=Count("d_kv", absent=64, also=("head_dim",)),
        kinds=_decoder_depth(decoder_depth),
        layers={FULL: with_source()},
    )


def _t5gemma(kinds: Kinds) -> Family:
    """A Gemma decoder with windows; the cross-attention has its KV heads and no window."""
    window = sliding(absent=4096)
    return Family(
        sizes(2304, 26, 8),
        kv_heads=Count("num_key_value_heads", absent=4),
        head_dim=Count("head_dim", absent=256),
        kinds=layer_types(kinds),
        layers={FULL: with_source(attends=always), SLIDING: with_source(window, always)},
    )


def _dia_layer(fields: Fields, shape: Shape) -> tuple[LayerSpec, LayerSpec]:
    """Dia's cross-attention has heads of its own."""
    n = fields.count(Count("cross_num_attention_heads", absent=16))
    k = fields.count(Count("cross_num_key_value_heads", absent=16))
    h = fields.count(Count("cross_head_dim", absent=128))
    always(fields)
    return full(fields, shape), LayerSpec(n, k, h, h, cross=True)


_SOURCE = {FULL: with_source(attends=always)}
_BART = _bart(1024, 12, 16)
_T5 = _t5(512, 6, 8)
_MT5 = _t5(512, 8, 6)
_MUSICGEN = Family(sizes(1024, 24, 16), kv_heads=None, head_dim=None)
_MOONSHINE = ("hidden_size", "decoder_num_hidden_layers", "decoder_num_attention_heads")
_SEAMLESS = Family(
    sizes(1024, 24, 16, ("hidden_size", "decoder_layers", "decoder_attention_heads")),
    kv_heads=None,
    head_dim=None,
    layers={FULL: with_source()},
)

FAMILIES: dict[str, Reader] = {
    "bart": _BART,
    "bigbird_pegasus": _bart(1024, 16, 16),
    "blenderbot": _bart(2560, 24, 32),
    "blenderbot-small": _bart(512, 8, 16),
    "fsmt": _BART,
    "led": _BART,
    "m2m_100": _BART,
    "marian": _BART,
    "mbart": _BART,
    "mvp": _BART,
    "nllb-moe": _BART,
    "pegasus": _BART,
    "pegasus_x": _bart(1024, 16, 16),
    "plbart": _bart(768, 6, 12),
    "pp_formulanet_text": _bart(512, 8, 16, always),
    "speech_to_text": _bart(256, 6, 4),
    "speecht5": _bart(768, 6, 12),
    "whisper": _bart(384, 4, 6),
    "longt5": _T5,
    "mt5": _MT5,
    "pop2piano": _T5,
    "switch_transformers": _t5(768, 12, 12, decoder_depth=12),
    "t5": _T5,
    "udop": _t5(1024, 24, 16),
    "umt5": _MT5,
    "pix2struct_text_model": Family(
        sizes(768, 12, 12, ("hidden_size", "num_layers", "num_heads")),
        kv_heads=None,
        head_dim=Count("d_kv", absent=64),
        layers={FULL: with_source(attends=if_encoder_decoder(absent=False))},
    ),
    "t5_gemma_module": _t5gemma(alternating(SLIDING, FULL)),
    "t5gemma2_decoder": _t5gemma(every_nth(6, name="sliding_window_pattern")),
    "canary_decoder": Family(
        sizes(1024, 8, 8),
        kv_heads=replace(KV_HEADS, absent=8),
        head_dim=replace(HEAD_DIM, absent=128),
        layers=_SOURCE,
    ),
    "cohere_asr": Family(sizes(1024, 8, 8), layers=_SOURCE),
    "dia_decoder": Family(
        sizes(2048, 18, 16),
        kv_heads=Count("num_key_value_heads", absent=4),
        head_dim=Count("head_dim", absent=128),
        layers={FULL: _dia_layer},
    ),
    "moonshine": Family(
        sizes(288, 6, 8, _MOONSHINE),
        kv_heads=replace(
            KV_HEADS, name="decoder_num_key_value_heads", also=("num_key_value_heads",)
        ),
        layers=_SOURCE,
    ),
    "moonshine_streaming": Family(sizes(320, 6, 8), layers=_SOURCE),
    "musicgen_decoder": replace(_MUSICGEN, layers=_SOURCE),
    # The conditions are put before the tokens.
    "musicgen_melody_decoder": _MUSICGEN,
    "prophetnet": Family(
        Sizes(
            Count("hidden_size", nested=1024),
            Count("num_decoder_layers", nested=12),
            Count("num_decoder_attention_heads", nested=16),
        ),
        kv_heads=None,
        head_dim=None,
        layers={FULL: with_source(attends=_prophetnet_attends)},
        ignores=frozenset({"num_hidden_layers", "num_attention_heads"}),
    ),
    "seamless_m4t": _SEAMLESS,
    "seamless_m4t_v2": _SEAMLESS,
    "trocr": Family(
        sizes(1024, 12, 16, ("d_model", "decoder_layers", "decoder_attention_heads")),
        kv_heads=None,
        head_dim=None,
        layers={FULL: with_source(attends=always)},
    ),
}
