"""Families that only their own published code reads; sizes of published models by hand."""

import pytest

from kvjax.sizing import load

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8}
GPT = {"n_embd": 64, "n_layer": 4, "n_head": 8}


def config(model_type: str, **fields) -> dict:
    return {"model_type": model_type, **SIZES, **fields}


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        # Qwen-1.8B: MHA of kv_channels; 24 * 16 * 2 * 128 * 2.
        (
            {
                "model_type": "qwen",
                "hidden_size": 2048,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "kv_channels": 128,
                "seq_length": 8192,
            },
            196_608,
        ),
        # ChatGLM3-6B: two groups; 28 * 2 * 2 * 128 * 2.
        (
            {
                "model_type": "chatglm",
                "hidden_size": 4096,
                "num_layers": 28,
                "num_attention_heads": 32,
                "kv_channels": 128,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
            },
            28_672,
        ),
        # Phi-3-small: block-sparse layers keep every token too; 32 * 8 * 2 * 128 * 2.
        (
            {
                "model_type": "phi3small",
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "dense_attention_every_n_layers": 2,
                "blocksparse_block_size": 64,
                "blocksparse_num_local_blocks": 16,
                "blocksparse_vert_stride": 8,
            },
            131_072,
        ),
        # InternLM2-20B: 48 * 8 * 2 * 128 * 2.
        (
            {
                "model_type": "internlm2",
                "hidden_size": 6144,
                "num_hidden_layers": 48,
                "num_attention_heads": 48,
                "num_key_value_heads": 8,
            },
            196_608,
        ),
        # Phi-2's first revision: MHA under GPT-2's names; 32 * 32 * 2 * 80 * 2.
        (
            {
                "model_type": "phi-msft",
                "n_embd": 2560,
                "n_layer": 32,
                "n_head": 32,
                "n_head_kv": None,
            },
            327_680,
        ),
        # The first Falcon-40B: 60 * 8 * 2 * 64 * 2.
        (
            {
                "model_type": "RefinedWeb",
                "hidden_size": 8192,
                "n_layer": 60,
                "n_head": 128,
                "n_head_kv": 8,
            },
            122_880,
        ),
        # The first Falcon-7B: 32 * 1 * 2 * 64 * 2.
        (
            {
                "model_type": "RefinedWebModel",
                "hidden_size": 4544,
                "n_layer": 32,
                "n_head": 71,
                "multi_query": True,
            },
            8_192,
        ),
        # PLaMo-13B: 8 query heads share one; 40 * 5 * 2 * 128 * 2.
        (
            {
                "model_type": "plamo",
                "hidden_size": 5120,
                "num_hidden_layers": 40,
                "num_attention_heads": 40,
                "n_shared_head": 8,
            },
            102_400,
        ),
        # OpenELM-270M lists heads: (5 * 3 + 7 * 4 + 4 * 5) * 2 * 64 * 2.
        (
            {
                "model_type": "openelm",
                "model_dim": 1280,
                "num_transformer_layers": 16,
                "head_dim": 64,
                "num_query_heads": [12] * 5 + [16] * 7 + [20] * 4,
                "num_kv_heads": [3] * 5 + [4] * 7 + [5] * 4,
            },
            16_128,
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_bytes_of_a_token(given, nbytes):
    assert load(given).bytes_per_token() == nbytes


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (config("baichuan"), 8),
        (config("chatglm", num_layers=4, kv_channels=8, multi_query_group_num=2), 8),
        ({"model_type": "codeshell", **GPT, "num_query_groups": 2}, 8),
        (
            {
                "model_type": "codeshell",
                **GPT,
                "num_query_groups": 2,
                "group_query_attention": True,
            },
            2,
        ),
        ({"model_type": "phi-msft", **GPT, "n_head_kv": 2}, 2),
        ({"model_type": "mixformer-sequential", **GPT}, 8),
        ({"model_type": "jais", **GPT}, 8),
        ({"model_type": "telechat", "hidden_size": 64, "n_layer": 4, "n_head": 8}, 8),
        (config("grok-1"), 8),
        (config("deepseek", num_key_value_heads=None), 8),
        (config("arctic", num_key_value_heads=2), 2),
        (config("internlm"), 8),
    ],
)
def test_kv_heads(given, kept):
    assert {layer.kv_heads for layer in load(given).layers} == {kept}


def test_hunyuan_shares_records_between_layers():
    given = config("hunyuan", use_cla=True, cla_share_factor=2, kv_lora_rank=512, use_mla=False)
    spec = load(given)
    assert [layer.shares_with for layer in spec.layers] == [None, 0, None, 2]
    assert spec.cache_bytes(10).allocated == 2 * 8 * 2 * 8 * 2 * 10
    assert spec.cache_bytes(10).read_per_step == 4 * 8 * 2 * 8 * 2 * 10
    assert load({**given, "use_cla": False}).cache_bytes(10).allocated == 4 * 8 * 2 * 8 * 2 * 10


def test_kv_heads_of_each_layer():
    given = config("deci", num_key_value_heads_per_layer=[4, 2, 2, 1])
    assert [layer.kv_heads for layer in load(given).layers] == [4, 2, 2, 1]


def test_blocks_found_by_search():
    attention = [
        {"n_heads_in_group": 4, "no_op": False},
        {"n_heads_in_group": None, "no_op": True},
        {"n_heads_in_group": None, "replace_with_linear": True},
        {"n_heads_in_group": 8},
    ]
    blocks = [{"attention": part, "ffn": {"ffn_mult": 2.0}} for part in attention]
    spec = load(config("nemotron-nas", block_configs=blocks))
    assert [layer.kv_heads for layer in spec.layers] == [2, 0, 0, 1]
    assert spec.cache_bytes(10).allocated == (2 + 1) * 2 * 8 * 2 * 10


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config("Yi"), "num_key_value_heads: absent"),
        (config("baichuan", num_key_value_heads=2), "num_key_value_heads: got 2"),
        (config("deci", num_key_value_heads_per_layer=[4, 2]), "_per_layer: got"),
        (config("plamo", n_shared_head=3), "n_shared_head: got 3"),
        (config("hunyuan", use_mla=True), "use_mla: got True"),
        (
            config("nemotron-nas", block_configs=[{"attention": {"window_length": 8}}] * 4),
            "block_configs.attention.window_length: got 8",
        ),
        (
            config("nemotron-nas", block_configs=[{"attention": {"n_heads_in_group": 3}}] * 4),
            "n_heads_in_group: got 3",
        ),
    ],
)
def test_refusals(given, message):
    with pytest.raises(ValueError, match=message):
        load(given)
