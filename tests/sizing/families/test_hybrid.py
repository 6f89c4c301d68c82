"""Models of which some or all layers keep a state: how large, on which shard, in which layers."""

import pytest

from kvjax.sizing import ModelSpec, load

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"

JAMBA = {  # Jamba-v0.1
    "model_type": "jamba",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}
NEMOTRON_H = {  # Nemotron-H-8B
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "hidden_size": 4096,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "expand": 2,
}
QWEN3_NEXT = {  # Qwen3-Next-80B-A3B
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
KIMI = {  # Kimi-Linear-48B-A3B, as published
    "model_type": "kimi_linear",
    "hidden_size": 2304,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 0,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
MINIMAX = {  # MiniMax-Text-01
    "model_type": "minimax_text_01",
    "hidden_size": 6144,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attn_type_list": ([0] * 7 + [1]) * 10,
}
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def small(model_type: str, **fields) -> dict:
    return {"model_type": model_type, **SMALL, **fields}


def state(config: dict, tp: int = 1, codec: str = "bf16") -> int:
    return load(config).cache_bytes(1, codec=codec, tp=tp).state


def attending(spec: ModelSpec) -> list[int]:
    return [index for index, layer in enumerate(spec.layers) if layer.kind != "state"]


# --- published models


def test_jamba():
    """28 of 32 layers: 4 last inputs in bf16 and 16 numbers in f32 for each of 8192 channels."""
    assert state(JAMBA) == 28 * 8192 * (4 * 2 + 16 * 4) == 16_515_072
    assert attending(load(JAMBA)) == [4, 12, 20, 28]


def test_qwen3_next():
    """36 of 48 layers: 8192 channels of q, k and v, and 32 matrices of 128 × 128 in f32."""
    assert state(QWEN3_NEXT) == 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4) == 77_856_768
    assert len(attending(load(QWEN3_NEXT))) == 12


def test_nemotron_h():
    """24 Mamba layers of 128 heads; B and C of 8 groups pass through the convolution too."""
    inputs = (128 * 64 + 2 * 8 * 128) * 4 * 2
    assert state(NEMOTRON_H) == 24 * (inputs + 128 * 64 * 128 * 4) == 102_629_376
    assert attending(load(NEMOTRON_H)) == [7, 18, 29, 40]


@pytest.mark.parametrize("model_type", ["minimax", "minimax_text_01", "minimax_m1"])
def test_minimax_keeps_its_states_in_the_activations_dtype(model_type):
    config = {**MINIMAX, "model_type": model_type}
    assert state(config) == 70 * 64 * 128 * 128 * 2 == 146_800_640
    assert state(config, codec="f32") == 2 * 146_800_640
    assert attending(load(config)) == list(range(7, 80, 8))


def test_kimi_linear_counts_its_layers_from_one():
    spec = load(KIMI)
    assert attending(spec) == [3, 7, 11, 15, 19, 23, 26]
    assert spec.bytes_per_token() == 7 * (512 + 64) * 2
    kda = 3 * 32 * 128 * 4 * 2 + 32 * 128 * 128 * 4
    assert state(KIMI) == 20 * kda
    held = spec.cache_bytes(100, definition="hf-dynamic")
    assert (held.allocated, held.state) == (7 * 576 * 2 * 100, 20 * kda)


def test_transformers_takes_six_latent_layers_without_the_list_of_the_others():
    given = {key: value for key, value in KIMI["linear_attn_config"].items() if key != "kda_layers"}
    spec = load({**KIMI, "linear_attn_config": given})
    assert attending(spec) == [3, 7, 11, 15, 19, 23, 26]
    held = spec.cache_bytes(8192, definition="hf-dynamic")
    assert (held.allocated, held.state) == (56_623_104, 46_104_576)


def test_falcon_mamba_has_the_channels_it_states():
    """Falcon-Mamba-7B: `expand` 16 of its config is not the ratio of its 8192 channels."""
    config = {
        "model_type": "falcon_mamba",
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "expand": 16,
        "intermediate_size": 8192,
        "conv_kernel": 4,
        "state_size": 16,
    }
    assert state(config) == 64 * 8192 * (4 * 2 + 16 * 4)


def test_zamba2_with_the_first_names_of_its_fields():
    """Zamba2-7B as first published: heads follow from their width."""
    config = {
        "model_type": "zamba2",
        "hidden_size": 3584,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "kv_channels": 224,
        "num_query_groups": 32,
        "layers_block_type": ["mamba"] * 5 + ["hybrid"],
        "mamba_headdim": 64,
        "mamba_ngroups": 2,
        "state_size": 64,
        "conv_dimension": 4,
        "expansion_factor": 2,
        "sliding_window": None,
    }
    spec = load(config)
    assert spec.layers[5].key_dim == 224  # twice the model's width, over 32 heads
    assert state(config) == 6 * ((7168 + 2 * 2 * 64) * 4 * 2 + 112 * 64 * 64 * 4)


def test_recurrent_gemma():
    """RecurrentGemma-2B: 18 recurrent layers of 2560 channels, 8 with a window of 2048."""
    config = {
        "model_type": "recurrent_gemma",
        "hidden_size": 2560,
        "num_hidden_layers": 26,
        "num_attention_heads": 10,
        "num_key_value_heads": 1,
        "lru_width": 2560,
        "attention_window_size": 2048,
        "conv1d_width": 4,
        "block_types": ["recurrent", "recurrent", "attention"],
    }
    assert state(config) == 18 * 2560 * (3 * 2 + 4)
    spec = load(config)
    assert attending(spec) == list(range(2, 26, 3))
    held = spec.cache_bytes(4096, definition="hf-dynamic")
    # transformers keeps the states in its modules, beside the cache.
    assert (held.allocated, held.state) == (8 * 2047 * 2 * 256 * 2, 18 * 2560 * (3 * 2 + 4))


# --- shards


def test_channels_of_mamba_are_spread_over_shards():
    assert state(JAMBA, tp=8) * 8 == state(JAMBA)


def test_groups_are_repeated_where_there_are_more_shards():
    """Nemotron-H has 128 heads and 8 groups."""
    heads = 24 * (128 * 64 * 4 * 2 + 128 * 64 * 128 * 4)
    groups = 24 * 2 * 8 * 128 * 4 * 2
    assert state(NEMOTRON_H, tp=8) == (heads + groups) // 8
    assert state(NEMOTRON_H, tp=32) == heads // 32 + groups // 8


def test_key_heads_are_repeated_where_there_are_more_shards():
    """Qwen3-Next has 16 key heads and 32 value heads."""
    keys = 36 * 2 * 16 * 128 * 4 * 2
    values = 36 * (32 * 128 * 4 * 2 + 32 * 128 * 128 * 4)
    assert state(QWEN3_NEXT, tp=32) == keys // 16 + values // 32


def test_convolutions_of_whole_outputs_are_on_every_shard():
    """Inkling: K and V by heads, the outputs of attention and feed-forward whole; all in f32."""
    config = small(
        "inkling2_text",
        head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_head_dim=8,
        sliding_window_size=8,
    )
    spread = 5 * 2 * 4 * 8 + 2 * 2 * 16  # five windows, one layer without
    whole = 6 * 2 * 64
    assert state(config) == (spread + whole) * 4 * 4
    assert state(config, tp=2) == (spread // 2 + whole) * 4 * 4


# --- which layers


def test_a_pattern_spells_what_a_list_names():
    named = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    fields = small("nemotron_h", num_hidden_layers=5, hybrid_override_pattern="M*-EM")
    listed = {
        **{key: value for key, value in fields.items() if "pattern" not in key},
        "layers_block_type": [named[letter] for letter in "M*-EM"],
    }
    del listed["num_hidden_layers"]  # transformers saves none beside the list
    assert load(listed).layers == load(fields).layers
    assert [len(layer.states) for layer in load(fields).layers] == [3, 0, 0, 0, 3]


def test_heads_of_nemotron_h_need_not_fill_the_expanded_width():
    """Nemotron-Nano-9B-v2: 128 heads of 80, although 2 * 4480 is 8960."""
    fields = {"hidden_size": 4480, "num_attention_heads": 40, "mamba_head_dim": 80, "expand": 2}
    config = small("nemotron_h", num_hidden_layers=1, hybrid_override_pattern="M", **fields)
    assert state(config) == (128 * 80 + 2 * 8 * 128) * 4 * 2 + 128 * 80 * 128 * 4


def test_the_interval_of_attention():
    config = {**QWEN3_NEXT, "full_attention_interval": 3, "num_hidden_layers": 7}
    assert attending(load(config)) == [2, 5]
    listed = {**config, "layer_types": [FULL] + [LINEAR] * 6}
    assert attending(load(listed)) == [0]


def test_lfm2_lists_attention_by_index_or_by_name():
    by_index = small("lfm2", full_attn_idxs=[2, 5])
    assert attending(load(by_index)) == [2, 5]
    by_name = small("lfm2", full_attn_idxs=[2], layer_types=["conv", FULL] * 3)
    assert attending(load(by_name)) == [1, 3, 5]
    assert attending(load(small("lfm2"))) == [0, 1, 2, 3, 4, 5]
    assert state(by_index) == 4 * 64 * 3 * 2


def test_bamba_without_indices_never_attends():
    config = small("bamba", mamba_n_heads=8)
    assert attending(load(config)) == []
    assert attending(load({**config, "attn_layer_indices": [1, 4]})) == [1, 4]
    assert load({**config, "attn_layer_indices": [1]}).layers[1].kv_heads == 2


def test_olmo_hybrid_attends_at_least_once():
    assert attending(load(small("olmo_hybrid", num_hidden_layers=3))) == [2]
    assert attending(load(small("olmo_hybrid"))) == [3]


def test_olmo_hybrids_widths_follow_from_its_heads():
    """Keys of 3/4 of 64 over 4 heads, values twice as wide."""
    config = small("olmo_hybrid", num_hidden_layers=2)
    assert state(config) == (2 * 4 * 12 + 4 * 24) * 4 * 2 + 4 * 12 * 24 * 4


def test_every_pass_of_a_loop_keeps_its_own():
    config = small(
        "inkling2_loop_text",
        loop_config={"core_start": 2, "core_end": 4, "num_passes": 3},
        loop_layer_index_start=0,
    )
    spec = load(config)
    assert len(spec.layers) == 6 + 2 * 2
    assert spec.layers[6:] == spec.layers[2:4] * 2


def test_zaya_keeps_half_a_value_and_its_convolutions_inputs():
    config = small("zaya", head_dim=16, layer_types=["hybrid", "hybrid_sliding"] * 3)
    spec = load({**config, "sliding_window": 8})
    assert [layer.window for layer in spec.layers] == [None, 8] * 3
    assert spec.cache_bytes(1).state == 6 * ((4 + 2) * 16 * 2 + 2 * 16 // 2) * 2


def test_minimax_windows_are_unknown_to_transformers_cache():
    spec = load({**MINIMAX, "sliding_window": 100})
    assert spec.cache_bytes(1000).allocated == 10 * 100 * 2 * 8 * 128 * 2
    held = spec.cache_bytes(1000, definition="hf-dynamic")
    assert held.allocated == 10 * 1000 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("head_dim", [12, 16])
def test_bailing_hybrid_as_published_and_as_saved(head_dim):
    """A saved config holds the rope width in `head_dim`, and the width of KDA's heads apart."""
    fields = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "layer_group_size": 3}
    config = small("bailing_hybrid", head_dim=head_dim, **fields)
    assert attending(load(config)) == [2, 5]
    assert state(config) == 4 * (3 * 4 * head_dim * 4 * 2 + 4 * head_dim * head_dim * 4)
    saved = {**config, "head_dim": 8, "linear_head_dim": head_dim, "linear_num_heads": 4}
    assert load(saved).layers == load(config).layers


# --- indexes over blocks of tokens


def test_qwen4_keeps_one_index_key_a_block_and_transformers_one_a_token():
    config = small(
        "qwen4_exp_text",
        num_hidden_layers=4,
        head_dim=16,
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=16,
        indexer_compress_ratio=4,
    )
    spec = load(config)
    records = 2 * 2 * 16
    assert spec.cache_bytes(102).allocated == (102 * records + 25 * 8) * 2
    assert spec.cache_bytes(102).read_per_step == (16 * records + 25 * 8) * 2
    assert spec.cache_bytes(102, definition="hf-dynamic").allocated == 102 * (records + 8) * 2
    grams = load({**config, "ple_layer_ids": [2]})
    features, ids = grams.layers[1].states[-2:]
    assert features.elements == 4 * 64 * (4 - 1) * 3
    assert (ids.elements, ids.itemsize) == (3 - 1, 8)
    assert grams.layers[0].states == spec.layers[0].states


def test_glm5_keeps_one_index_key_a_block():
    config = small(
        "glm5_next_text",
        num_hidden_layers=8,
        kv_lora_rank=16,
        q_lora_rank=24,
        index_head_dim=8,
        index_kpool=4,
        index_topk=16,
        linear_attn_config={"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 3},
        indexer_types=["full"] * 7 + ["shared"],
    )
    spec = load(config)
    assert attending(spec) == [3, 7]
    assert spec.cache_bytes(102).allocated == (2 * 102 * 16 + 25 * 8) * 2
    held = spec.cache_bytes(102, definition="hf-dynamic")
    assert held.allocated == 102 * (2 * 16 + 17) * 2
    assert held.state == 6 * (3 * 2 * 8 * 3 * 2 + 2 * 8 * 8 * 4)


# --- refusals


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**NEMOTRON_H, "num_hidden_layers": 51}, "hybrid_override_pattern: got 52 letters"),
        (small("nemotron_h", hybrid_override_pattern="M-*xMM"), "hybrid_override_pattern: .*'x'"),
        (small("nemotron_h", layers_block_type=["mamba", "conv"] * 3), "layers_block_type: .*conv"),
        (small("granitemoehybrid", layer_types=["mamba"]), "layer_types: got 1 names"),
        (small("zamba2"), "layers_block_type: absent with 6 layers"),
        ({**JAMBA, "attn_layer_offset": 8}, "attn_layer_offset: got 8"),
        (small("lfm2", full_attn_idxs="0,1"), "full_attn_idxs: got '0,1'"),
        (small("lfm2_moe"), "layer_types: absent"),
        ({**MINIMAX, "attn_type_list": [0, 1]}, r"attn_type_list: got \[0, 1\]"),
        ({**MINIMAX, "attn_type_list": [2] * 80}, "attn_type_list"),
        (small("recurrent_gemma", block_types=["rnn"]), "block_types: got"),
        (
            {**KIMI, "linear_attn_config": {"full_attn_layers": [0, 28]}},
            r"linear_attn_config.full_attn_layers: got \[0, 28\]",
        ),
        ({**QWEN3_NEXT, "linear_num_value_heads": 24}, "linear_num_value_heads: got 24"),
        (small("mamba2", num_heads=8, head_dim=8), "num_heads: got 8 with head_dim 8"),
        ({**NEMOTRON_H, "n_groups": 3}, "n_groups: got 3"),
        (small("xlstm", num_heads=4, qk_dim_factor="half"), "qk_dim_factor: got 'half'"),
        (small("qwen4_exp_text"), "indexer_head_dim: absent"),
        (small("inkling2_loop_text", loop_num_passes=0), "loop_num_passes: got 0"),
    ],
)
def test_refusals_name_the_field(config, message):
    with pytest.raises(ValueError, match=message):
        load(config)


@pytest.mark.parametrize("name", ["attn_layer_indices", "full_attn_idxs", "linear_attn_config"])
def test_other_families_refuse_the_fields_of_hybrids(name):
    with pytest.raises(ValueError, match=name):
        load(small("llama", **{name: [1]}))
