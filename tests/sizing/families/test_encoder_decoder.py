"""Decoders that also attend to an encoder's output, by figures worked out by hand."""

import pytest

from kvjax.sizing import load

BART = {
    "model_type": "bart",
    "d_model": 1024,
    "encoder_layers": 6,
    "decoder_layers": 12,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 16,
    "num_hidden_layers": 6,
    "is_encoder_decoder": True,
}
T5 = {"model_type": "t5", "d_model": 1024, "d_kv": 128, "num_heads": 128, "num_layers": 24}
WHISPER = {
    "model_type": "whisper",
    "d_model": 1280,
    "encoder_layers": 32,
    "decoder_layers": 4,
    "encoder_attention_heads": 20,
    "decoder_attention_heads": 20,
    "num_hidden_layers": 32,
    "max_source_positions": 1500,
}
GEMMA = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "sliding_window": 8,
}


def kinds(config: dict) -> list[str]:
    return ["cross" if layer.cross else "self" for layer in load(config).layers]


def test_bart_has_the_decoders_layers_and_heads():
    spec = load(BART)
    assert kinds(BART) == ["self", "cross"] * 12
    assert {(layer.kv_heads, layer.key_dim) for layer in spec.layers} == {(16, 64)}
    assert spec.bytes_per_token() == 12 * 2 * 16 * 64 * 2


def test_the_source_is_kept_once_and_does_not_grow():
    spec, layer_bytes = load(BART), 12 * 2 * 16 * 64 * 2
    short, long = (spec.cache_bytes(n, 3, source_tokens=1000).ideal for n in (10, 50))
    assert short == 3 * (10 + 1000) * layer_bytes
    assert long - short == 3 * 40 * layer_bytes


@pytest.mark.parametrize(
    ("fields", "cross"),
    [({}, 12), ({"is_encoder_decoder": False}, 0), ({"is_encoder_decoder": ...}, 12)],
)
def test_a_decoder_alone_keeps_no_source(fields, cross):
    config = {name: value for name, value in {**BART, **fields}.items() if value is not ...}
    assert kinds(config).count("cross") == cross


def test_whisper_keeps_the_frames_of_its_encoder():
    """Large-v3-turbo: 4 decoder layers over 32 encoder layers."""
    spec = load(WHISPER)
    assert spec.bytes_per_token() == 4 * 2 * 1280 * 2 == 20_480
    assert spec.cache_bytes(0, source_tokens=1500).allocated == 1500 * 20_480


def test_heads_of_t5_are_d_kv_wide():
    """T5-11B: 128 heads of 128 over a width of 1024."""
    spec = load(T5)
    assert spec.d_model == 1024
    assert spec.bytes_per_token() == 24 * 2 * 128 * 128 * 2 == 1_572_864
    assert load({**T5, "d_kv": 64}).bytes_per_token() == 786_432


@pytest.mark.parametrize(
    ("model_type", "fields", "depth"),
    [
        ("t5", {}, 24),
        ("t5", {"num_decoder_layers": None}, 24),
        ("t5", {"num_decoder_layers": 6}, 6),
        ("mt5", {"num_decoder_layers": 30}, 30),
        ("switch_transformers", {}, 12),
        ("switch_transformers", {"num_decoder_layers": None}, 24),
    ],
)
def test_depth_of_t5(model_type, fields, depth):
    assert kinds({**T5, "model_type": model_type, **fields}) == ["self", "cross"] * depth


def test_windows_of_t5gemma_do_not_hide_the_source():
    t5gemma = {"model_type": "t5gemma", "decoder": GEMMA, "encoder": {"num_attention_heads": 16}}
    layers = load(t5gemma).layers
    assert [layer.window for layer in layers] == [8, None, None, None] * 2
    assert [layer.cross for layer in layers] == [False, True] * 4
    assert {(layer.kv_heads, layer.key_dim) for layer in layers} == {(2, 24)}


def test_pattern_of_t5gemma2():
    layers = load({"model_type": "t5gemma2", "decoder": {**GEMMA, "sliding_window_pattern": 2}})
    assert [layer.window for layer in layers.layers if not layer.cross] == [8, None, 8, None]
    layers = load({"model_type": "t5gemma2", "decoder": {**GEMMA, "num_hidden_layers": 7}})
    assert [layer.window for layer in layers.layers if not layer.cross] == [8] * 5 + [None, 8]


def test_cross_attention_of_dia_has_heads_of_its_own():
    dia = {"model_type": "dia", "decoder_config": {"num_hidden_layers": 1, "cross_head_dim": 96}}
    own, cross = load(dia).layers
    assert (own.query_heads, own.kv_heads, own.key_dim) == (16, 4, 128)
    assert (cross.query_heads, cross.kv_heads, cross.key_dim) == (16, 16, 96)


def test_heads_of_moonshine_are_the_decoders():
    config = {
        "model_type": "moonshine",
        "hidden_size": 288,
        "encoder_num_hidden_layers": 6,
        "encoder_num_attention_heads": 4,
        "encoder_num_key_value_heads": 2,
        "decoder_num_hidden_layers": 3,
        "decoder_num_attention_heads": 8,
    }
    layers = load(config).layers
    assert len(layers) == 6
    assert {(layer.kv_heads, layer.key_dim) for layer in layers} == {(8, 36)}


def test_prophetnet_can_be_without_cross_attention():
    config = {
        "model_type": "prophetnet",
        "hidden_size": 64,
        "num_decoder_layers": 3,
        "num_decoder_attention_heads": 4,
        "num_encoder_layers": 9,
        "num_encoder_attention_heads": 8,
    }
    assert kinds(config) == ["self", "cross"] * 3
    assert kinds({**config, "add_cross_attention": False}) == ["self"] * 3
    assert {layer.key_dim for layer in load(config).layers} == {16}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {name: value for name, value in BART.items() if name != "decoder_layers"},
            "decoder_layers: absent; accepted for bart",
        ),
        (
            {name: value for name, value in BART.items() if name != "decoder_attention_heads"},
            "decoder_attention_heads: absent",
        ),
        ({**BART, "decoder_attention_heads": 7}, "decoder_attention_heads: got 7 with d_model"),
        ({**BART, "hidden_size": 512}, "d_model, hidden_size: got .* accepted: one value"),
        ({**BART, "is_encoder_decoder": 1}, "is_encoder_decoder: got 1; accepted: true or false"),
        ({**BART, "num_key_value_heads": 2}, "num_key_value_heads: got 2; accepted for bart"),
        ({**T5, "d_kv": 64.0}, "d_kv: got 64.0"),
        ({**T5, "num_decoder_layers": 0}, "num_decoder_layers: got 0"),
    ],
)
def test_refusals_name_the_field(config, message):
    with pytest.raises(ValueError, match=message):
        load(config)
