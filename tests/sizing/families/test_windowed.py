"""Families of which some layers see a window or a chunk: which ones, how far, and whose records.

Numbers are worked out by hand; W is 8 and there are 8 layers unless a test says otherwise.
"""

import pytest

from kvjax.sizing import load

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
}
GEMMA_3N_E4B = {
    "model_type": "gemma3n_text",
    "hidden_size": 2048,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
}


def config(model_type: str, depth: int = 8, **fields) -> dict:
    given = {
        "model_type": model_type,
        "hidden_size": 64,
        "num_hidden_layers": depth,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
    }
    return {name: value for name, value in {**given, **fields}.items() if value is not ...}


def pattern(given: dict) -> str:
    """S for a layer with a window or a chunk, F for one that sees all keys."""
    return "".join("F" if layer.span is None else "S" for layer in load(given).layers)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (config("afmoe"), "SSSFSSSF"),
        (config("afmoe", global_attn_every_n_layers=2), "SFSFSFSF"),
        (config("beam"), "SSSSSFSF"),
        (config("cohere2"), "SSSFSSSF"),
        (config("cohere2", sliding_window_pattern=3), "SSFSSFSS"),
        (config("cohere2_moe", first_k_dense_replace=1), "FSSSFSSS"),
        (
            config("cohere2_moe", first_k_dense_replace=3, prefix_dense_sliding_window_pattern=2),
            "SFSSSSFS",
        ),
        (config("cohere_compass_text"), "FFFFFFFF"),
        (config("cwm"), "FSSSFSSS"),
        (config("doge"), "SSSSSSSS"),
        (config("doge", sliding_window=...), "FFFFFFFF"),
        (config("dots1", max_window_layers=6), "FFFFFFSS"),
        (config("exaone4"), "SSSFSSSF"),
        (config("exaone4", sliding_window=None), "FFFFFFFF"),
        (config("exaone4", sliding_window_pattern="LLG"), "SSFSSFSF"),
        (config("exaone_moe", sliding_window_pattern=2), "SFSFSFSF"),
        (config("flint"), "FFSSSFSF"),
        (config("gemma2"), "SFSFSFSF"),
        (config("gemma3_text"), "SSSSSFSS"),
        (config("gemma3_text", sliding_window_pattern=3), "SSFSSFSS"),
        (config("gemma4_text"), "SSSSSFSF"),  # the last layer always sees everything
        (config("gemma4_text", layer_types=[SLIDING] * 8), "SSSSSSSF"),
        (config("gpt_oss"), "SFSFSFSF"),
        (config("granite_swa"), "FSSSFSSS"),
        (config("kolibri1"), "SSSSFSSS"),
        (config("laguna"), "FFFFFFFF"),
        (config("llama4_text", sliding_window=...), "SSSFSSSF"),
        (config("llama4_text", sliding_window=..., no_rope_layer_interval=2), "SFSFSFSF"),
        (config("llama4_text", sliding_window=..., attention_chunk_size=None), "FFFFFFFF"),
        (config("mellum", layer_types=[SLIDING] * 7 + [FULL]), "SSSSSSSF"),
        (config("mimo_v2_flash"), "FSSSSFSS"),
        (config("ministral"), "SSSSSSSS"),
        (config("ministral3", sliding_window=...), "FFFFFFFF"),
        (config("mistral", sliding_window=...), "SSSSSSSS"),
        (config("mixtral", sliding_window=None), "FFFFFFFF"),
        (config("muse_glimmer_text"), "SSSFSSSF"),
        (config("muse_glimmer_text", depth=7), "SSFSSSF"),
        (config("olmo3"), "SSSFSSSF"),
        (config("qwen2_moe", use_sliding_window=True, max_window_layers=5), "SFSFSFFF"),
        (config("qwen2_moe", max_window_layers=5), "FFFFFFFF"),
        (config("qwen2_vl_text", use_sliding_window=True, max_window_layers=6), "FFFFFFSS"),
        (config("qwen3_moe"), "FFFFFFFF"),
        (config("qwen3_moe", use_sliding_window=True), "SSSSSSSS"),
        (config("smollm3", use_sliding_window=True), "FFFSFFFS"),
        (
            config("smollm3", use_sliding_window=True, no_rope_layers=[0] + [1] * 7),
            "SFFFFFFF",
        ),
        (config("starcoder2", sliding_window=...), "FFFFFFFF"),
    ],
)
def test_which_layers_have_a_window(given, expected):
    assert pattern(given) == expected


@pytest.mark.parametrize(
    ("given", "window"),
    [
        (config("gemma2", sliding_window=..., num_key_value_heads=4), 4096),
        (config("gpt_oss", sliding_window=...), 128),
        (config("mimo_v2_flash", sliding_window_size=128), 129),  # the query's own key as well
        (config("gemma3_text", use_bidirectional_attention=True), 5),
        (config("gemma4_text", use_bidirectional_attention="all"), 5),
        (config("gemma4_text", use_bidirectional_attention="vision"), 8),
        (config("llama4_text", sliding_window=...), 8192),
    ],
)
def test_width_of_the_window(given, window):
    assert {layer.span for layer in load(given).layers} - {None} == {window}


def test_half_of_modernberts_window():
    given = config(
        "modernbert-decoder",
        num_key_value_heads=...,
        head_dim=...,
        sliding_window=...,
        local_attention=12,
    )
    assert pattern(given) == "FSSFSSFS"
    assert load(given).layers[1].window == 6
    assert load({**given, "sliding_window": 12}).layers[1].window == 12


@pytest.mark.parametrize(
    ("tokens", "slots", "held"),
    # 2048 bytes a token and layer; in 18 of 36 layers W = 128 slots, of which transformers'
    # DynamicCache keeps 127.
    [
        (1, 73_728, 73_728),
        (128, 9_437_184, 9_437_184 - 18 * 2048),
        (129, 9_474_048, 9_474_048 - 18 * 2048),
        (8192, 306_708_480, 306_671_616),
    ],
)
def test_gpt_oss_120b(tokens, slots, held):
    spec = load(GPT_OSS_120B)
    assert spec.cache_bytes(tokens).allocated == slots
    assert spec.cache_bytes(tokens, definition="hf-static").allocated == slots
    assert spec.cache_bytes(tokens, definition="hf-dynamic").allocated == held


def test_gpt_neo_keeps_all_keys_in_transformers():
    given = {"model_type": "gpt_neo", "hidden_size": 64, "num_layers": 4, "num_heads": 8}
    spec = load({**given, "attention_types": [[["global", "local"], 2]], "window_size": 8})
    assert [layer.window for layer in spec.layers] == [None, 8] * 2
    assert spec.cache_bytes(20).allocated == 2 * 8 * 2 * 8 * 2 * (20 + 8)
    assert spec.cache_bytes(20, definition="hf-dynamic").allocated == 4 * 8 * 2 * 8 * 2 * 20


def test_gemma_3n_shares_records():
    """20 layers keep records, 16 of them of a window; 2 * 2 * 256 * 2 bytes a token and layer."""
    spec = load(GEMMA_3N_E4B)
    assert spec.cache_bytes(2048).allocated == (16 * 512 + 4 * 2048) * 2048 == 33_554_432
    held = spec.cache_bytes(2048, definition="hf-dynamic").allocated
    assert held == (16 * 511 + 4 * 2048) * 2048 == 33_521_664
    shared = {index: layer.shares_with for index, layer in enumerate(spec.layers[20:], 20)}
    assert {shared[index] for index in shared if spec.layers[index].window} == {18}
    assert {shared[index] for index in (24, 29, 34)} == {19}


def test_gemma_4_has_wider_full_layers():
    given = config("gemma4_text", global_head_dim=32, num_global_key_value_heads=1)
    assert [(layer.kv_heads, layer.key_dim) for layer in load(given).layers[4:6]] == [
        (2, 16),
        (2, 32),
    ]
    equal = load({**given, "attention_k_eq_v": True}).layers[5]
    assert (equal.kv_heads, equal.key_dim, equal.value_dim) == (1, 32, 32)
    saved = config("gemma4_text", per_layer_config={"05": {"head_dim": 48}})
    assert [layer.key_dim for layer in load(saved).layers[4:]] == [16, 48, 16, 16]


def test_mimo_has_keys_and_values_of_different_width():
    """Full layers: 2 * (24 + 16) * 4 bytes a token; with a window twice the heads."""
    spec = load(config("mimo_v2_flash", depth=2, head_dim=24, v_head_dim=16))
    assert spec.bytes_per_token("f32", at=100) == 2 * (24 + 16) * 4 == 320
    assert spec.layers[1].kv_heads == 4


def test_query_heads_of_each_layer():
    given = config("laguna", num_attention_heads_per_layer=[8, 12] * 4)
    assert [layer.query_heads for layer in load(given).layers] == [8, 12] * 4
    step = config(
        "step3p5",
        layer_types=[FULL, SLIDING] * 4 + [SLIDING],
        num_nextn_predict_layers=1,
        num_key_value_heads=...,
        num_attention_groups=2,
        attention_other_setting={"num_attention_heads": 12},
    )
    assert [layer.query_heads for layer in load(step).layers] == [8, 12] * 4
    assert {layer.kv_heads for layer in load(step).layers} == {2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config("gemma2", layer_types=[FULL] * 7), "layer_types: got 7 names; accepted: one name"),
        (config("gpt_oss", layer_types=[CHUNKED] * 8), "layer_types: got 'chunked_attention'"),
        (config("gemma2", sliding_window=None), "sliding_window: got null"),
        (config("mistral", sliding_window=0), "sliding_window: got 0"),
        (config("mistral", layer_types=[FULL] * 8), "layer_types: got"),
        (config("qwen3_moe", use_sliding_window=1), "use_sliding_window: got 1"),
        ({**GEMMA_3N_E4B, "num_kv_shared_layers": 35}, "num_kv_shared_layers: got 35"),
        ({**GEMMA_3N_E4B, "num_kv_shared_layers": 32}, "got 32, with which layer 4 finds"),
        (config("cohere2_moe", first_k_dense_replace=9), "first_k_dense_replace: got 9"),
        (config("exaone4", sliding_window_pattern="LX"), "sliding_window_pattern: got 'LX'"),
        (config("llama4_text", sliding_window=..., no_rope_layers=[1]), "no_rope_layers: got"),
        (config("mimo_v2_flash", hybrid_layer_pattern=[1] * 8), "hybrid_layer_pattern: got"),
        (
            config("laguna", num_attention_heads_per_layer=[8]),
            "num_attention_heads_per_layer: got",
        ),
    ],
)
def test_refusals(given, message):
    with pytest.raises(ValueError, match=message):
        load(given)
