"""Families in which every layer attends to all keys: which heads, how wide, and what is refused.

Numbers are worked out by hand: bytes of one token are layers * K * (H + HV) * 2 in bf16.
"""

import pytest

from kvjax.sizing import load

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8}
GPT = {"n_embd": 64, "n_layer": 4, "n_head": 8}


def config(model_type: str, **fields) -> dict:
    return {"model_type": model_type, **SIZES, **fields}


def heads(given: dict) -> tuple[int, int, int]:
    layer = load(given).layers[0]
    return layer.query_heads, layer.kv_heads, layer.key_dim


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        # Qwen3-32B: 128 wide heads, though 5120 / 64 = 80; 64 * 8 * 2 * 128 * 2.
        (
            {
                "model_type": "qwen3",
                "hidden_size": 5120,
                "num_hidden_layers": 64,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 128,
            },
            262_144,
        ),
        # Mistral-Nemo: 128, not 5120 / 32 = 160; 40 * 8 * 2 * 128 * 2.
        (
            {
                "model_type": "mistral",
                "hidden_size": 5120,
                "num_hidden_layers": 40,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "sliding_window": None,
            },
            163_840,
        ),
        # Llama-3-8B: K heads and not N; 32 * 8 * 2 * 128 * 2.
        (
            {
                "model_type": "llama",
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
            },
            131_072,
        ),
        # GPT-J-6B: MHA under GPT-2's names; 28 * 16 * 2 * 256 * 2.
        ({"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16}, 458_752),
        # DBRX: K is inside attn_config; 40 * 8 * 2 * 128 * 2.
        (
            {
                "model_type": "dbrx",
                "d_model": 6144,
                "n_layers": 40,
                "n_heads": 48,
                "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000},
            },
            163_840,
        ),
    ],
    ids=["qwen3-32b", "mistral-nemo", "llama-3-8b", "gpt-j", "dbrx"],
)
def test_bytes_of_a_token(given, nbytes):
    assert load(given).bytes_per_token() == nbytes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (config("phi"), (8, 8, 8)),
        (config("cohere", num_key_value_heads=None), (8, 8, 8)),
        (config("gemma", num_key_value_heads=1), (8, 1, 256)),
        (config("ernie4_5", num_key_value_heads=4, head_dim=None), (8, 4, 8)),
        (config("glm4_moe", num_attention_heads=24), (24, 8, 2)),  # 64 / 24, rounded down
        (config("exaone", num_layers=4, num_hidden_layers=4), (8, 8, 8)),
        (config("hunyuan_v1_moe", attention_head_dim=16, kv_lora_rank=512), (8, 8, 16)),
        (config("cpmant", dim_head=24), (8, 8, 24)),
        (
            config("jetmoe", num_key_value_heads=4, kv_channels=24, num_experts_per_tok=2),
            (8, 4, 24),
        ),
        ({"model_type": "bloom", "n_embed": 64, "n_layer": 2, "n_head": 4}, (4, 4, 16)),
        ({"model_type": "xglm", "d_model": 64, "num_layers": 2, "attention_heads": 4}, (4, 4, 16)),
    ],
)
def test_heads_of_families(given, expected):
    assert heads(given) == expected


@pytest.mark.parametrize(
    ("flags", "kept", "in_transformers"),
    [
        ({}, 1, 1),
        ({"num_kv_heads": 8}, 1, 1),  # Falcon-7B says 71, and keeps one
        ({"multi_query": False}, 8, 8),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2, 8),
        ({"new_decoder_architecture": True, "num_kv_heads": None}, 8, 8),
    ],
)
def test_falcon(flags, kept, in_transformers):
    """The groups of Falcon-40B are written out for all query heads by transformers alone."""
    spec = load(config("falcon", **flags))
    assert spec.layers[0].kv_heads == kept
    assert spec.cache_bytes(10, codec="f32").allocated == 4 * kept * 2 * 8 * 4 * 10
    held = spec.cache_bytes(10, codec="f32", definition="hf-dynamic").allocated
    assert held == 4 * in_transformers * 2 * 8 * 4 * 10


def test_multi_query_flag_of_gpt_bigcode():
    assert heads({"model_type": "gpt_bigcode", **GPT}) == (8, 1, 8)
    assert heads({"model_type": "gpt_bigcode", **GPT, "multi_query": False}) == (8, 8, 8)


def test_mpt_caches_all_heads_in_transformers():
    mpt = {"model_type": "mpt", "d_model": 64, "n_layers": 4, "n_heads": 8}
    spec = load({**mpt, "attn_config": {"attn_type": "multiquery_attention"}})
    ours, theirs = (
        spec.cache_bytes(10, definition=name).allocated for name in ("kvjax", "hf-dynamic")
    )
    assert theirs == 8 * ours == 4 * 8 * 2 * 8 * 2 * 10
    grouped = {"attn_type": "grouped_query_attention", "kv_n_heads": 2}
    assert load({**mpt, "attn_config": grouped}).layers[0].kv_heads == 2


def test_learned_prompt_is_kept_before_the_sequence():
    spec = load(config("cpmant", dim_head=8, prompt_length=32))
    assert spec.cache_bytes(10).allocated == 4 * 8 * 2 * 8 * 2 * (10 + 32)
    assert spec.bytes_per_token(at=10) == 4 * 8 * 2 * 8 * 2


def test_gpt_1_recomputes_in_transformers():
    spec = load({"model_type": "openai-gpt", **GPT})
    assert spec.cache_bytes(10).allocated > 0
    assert spec.cache_bytes(10, definition="hf-dynamic").total == 0


def test_cross_attention_keeps_the_source():
    spec = load({"model_type": "gpt2", **GPT, "add_cross_attention": True})
    own, cross = spec.layers[:2]
    assert (own.cross, cross.cross, len(spec.layers)) == (False, True, 8)
    assert spec.cache_bytes(10, source_tokens=7).allocated == 4 * 8 * 2 * 8 * 2 * (10 + 7)


def test_mllama_keeps_no_text_where_it_sees_the_image():
    spec = load(config("mllama_text_model", cross_attention_layers=[1, 3]))
    assert [layer.cross for layer in spec.layers] == [False, True, False, True]
    assert spec.cache_bytes(10, source_tokens=7).allocated == 2 * 8 * 2 * 8 * 2 * (10 + 7)


def test_passes_of_a_loop_keep_records_of_their_own():
    stack = config("hrm_text", num_hidden_layers=2, H_cycles=2, L_cycles=3, head_dim=8)
    assert len(load(stack).layers) == 2 * 2 * (3 + 1)
    saved = {**stack, "num_hidden_layers": 16, "num_layers_per_stack": 2}
    assert load(saved).layers == load(stack).layers


def test_dory_loops():
    blocks = ["sliding_attention", "mlp", "full_attention", "mlp"] * 3
    given = config(
        "dory",
        num_hidden_layers=12,
        layer_types=blocks,
        n_input_layers=4,
        n_output_layers=4,
        n_recurrent_loops=3,
        num_key_value_heads=2,
    )
    # Six layers, two of them in the loop and run three times.
    assert [layer.window for layer in load(given).layers] == [1024, None] * 5
    last = load({**given, "recurrent_kv_cache_mode": "last_loop"}).layers
    assert [layer.shares_with for layer in last] == [None] * 6 + [2, 3, 2, 3]


def test_decoders_of_berts_kind():
    assert heads(config("bert", is_decoder=True)) == (8, 8, 8)
    with pytest.raises(ValueError, match="is_decoder: got false; accepted for roberta: true"):
        load(config("roberta"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config("gemma", num_key_value_heads=8, head_dim=None), "head_dim: got null"),
        (config("stablelm", num_key_value_heads=None), "num_key_value_heads: got null"),
        (config("llama", sliding_window=128), "sliding_window: got 128; accepted for llama"),
        (config("olmo", num_key_value_heads=3), "num_key_value_heads: got 3"),
        (config("falcon", multi_query=False, num_kv_heads=2), "num_kv_heads: got 2"),
        (config("falcon", multi_query="yes"), "multi_query: got 'yes'"),
        (config("hunyuan_v1_dense", use_cla=True), "use_cla: got True"),
        (config("hunyuan_v1_dense", use_mla=True), "use_mla: got True"),
        (config("mllama_text_model", cross_attention_layers=[4]), "cross_attention_layers: got"),
        (config("hrm_text", num_layers_per_stack=3), "num_layers_per_stack: got 3"),
        (
            {"model_type": "gpt_bigcode", **GPT, "add_cross_attention": True},
            "add_cross_attention: got True with multi_query",
        ),
        (
            {
                "model_type": "mpt",
                "d_model": 64,
                "n_layers": 4,
                "n_heads": 8,
                "attn_config": {"attn_type": "linear"},
            },
            "attn_config.attn_type: got 'linear'",
        ),
    ],
)
def test_refusals(given, message):
    with pytest.raises(ValueError, match=message):
        load(given)
