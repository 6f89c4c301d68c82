"""Latents and indexes, by numbers worked out by hand from the classes' rules.

Figures of tiny models were also measured in transformers 5.24's DynamicCache.
"""

import pytest

from kvjax import sizing
from kvjax.sizing.layer import LayerSpec

V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
}
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
INDEX = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8}


def layers(model_type: str, **fields) -> tuple[LayerSpec, ...]:
    return sizing.load({"model_type": model_type, **TINY, **fields}).layers


def index_dims(model_type: str, **fields) -> list[int]:
    return [layer.index_dim for layer in layers(model_type, **INDEX, **fields)]


def refused(match: str, model_type: str, **fields) -> None:
    with pytest.raises(ValueError, match=match):
        layers(model_type, **fields)


# --- MLA


@pytest.mark.parametrize("definition", ["kvjax", "hf-dynamic", "hf-static"])
def test_a_token_leaves_one_latent_and_one_rope_key(definition):
    held = sizing.load(V3).cache_bytes(4096, definition=definition)
    assert held.allocated == (512 + 64) * 61 * 4096 * 2 == 287_834_112


@pytest.mark.parametrize("kv_heads", [None, 1, 64, 128])
def test_kv_heads_of_the_config_do_not_matter(kv_heads):
    assert sizing.load({**V3, "num_key_value_heads": kv_heads}).bytes_per_token() == 70_272


def test_kimi_k2_is_deepseek_v3_under_its_own_name():
    kimi = sizing.load({**V3, "model_type": "kimi_k2", "num_attention_heads": 64})
    assert kimi.bytes_per_token() == 70_272
    assert kimi.layers[0].query_heads == 64


@pytest.mark.parametrize(
    ("model_type", "width"),
    [
        ("axk1", 576),
        ("axk2", 160),
        ("glm4_moe_lite", 576),
        ("minicpm3", 288),
        ("mistral4", 320),
        ("mistral_large4_text", 576),
        ("sarvam_mla", 576),
        ("youtu", 576),
    ],
)
def test_ranks_that_a_config_leaves_out_are_its_class_s(model_type, width):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    (layer,) = sizing.load({"model_type": model_type, **sizes}).layers
    assert layer.latent_rank + layer.rope_dim == width


def test_null_means_a_query_without_bottleneck():
    assert layers("deepseek_v3", q_lora_rank=None)[0].query_rank is None
    assert layers("deepseek_v3")[0].query_rank == 20
    assert sizing.load(V3).layers[0].query_rank == 1536


@pytest.mark.parametrize("values", [{}, {"v_head_dim": None}])
def test_minicpm3_s_values_are_a_share_of_the_width_without_a_field(values):
    sizes = {"hidden_size": 2560, "num_hidden_layers": 62, "num_attention_heads": 40}
    (layer, *_) = sizing.load({"model_type": "minicpm3", **sizes, **values}).layers
    assert (layer.key_dim, layer.value_dim) == (96, 64)


def test_deepseek_v2_without_mla_keeps_heads():
    heads = {"use_mla": False, "kv_lora_rank": None, "v_head_dim": 0, "qk_nope_head_dim": 0}
    (layer, *_) = layers("deepseek_v2", num_key_value_heads=2, **heads, qk_rope_head_dim=0)
    assert (layer.kind, layer.kv_heads, layer.key_dim, layer.value_dim) == ("attention", 2, 16, 16)


@pytest.mark.parametrize("depth", [{"num_layers": 3}, {"num_layers": 3, "num_hidden_layers": 6}])
def test_longcat_has_two_attentions_a_layer(depth):
    config = {"model_type": "longcat_flash", **TINY, "num_hidden_layers": None, **depth}
    assert len(sizing.load(config).layers) == 6


def test_longcat_counts_both_attentions_as_hidden_layers():
    assert len(layers("longcat_flash", num_hidden_layers=8)) == 8
    refused(
        "num_hidden_layers: got 28 with num_layers 28",
        "longcat_flash",
        num_hidden_layers=28,
        num_layers=28,
    )
    refused("num_hidden_layers: got 5", "longcat_flash", num_hidden_layers=5)


def test_what_mla_has_no_field_for_is_refused():
    refused(
        "layer_types: got 'sliding_attention'", "deepseek_v3", layer_types=["sliding_attention"] * 4
    )
    refused("sliding_window: got 128", "deepseek_v3", sliding_window=128)
    refused("index_head_dim: got 16", "deepseek_v3", index_head_dim=16)
    refused("kv_lora_rank: got 0", "deepseek_v3", kv_lora_rank=0)


# --- An index


def test_an_index_key_is_kept_beside_the_latent():
    v32 = sizing.load({**V3, "model_type": "deepseek_v32", "index_head_dim": 128})
    held = v32.cache_bytes(4096)
    assert held.allocated == (512 + 64 + 128) * 61 * 4096 * 2 == 351_797_248


def test_a_step_reads_all_index_keys_and_the_records_they_pick():
    v32 = sizing.load({**V3, "model_type": "deepseek_v32", "index_topk": 2048})
    assert v32.cache_bytes(8192).read_per_step == 61 * (2048 * 576 + 8192 * 128) * 2
    assert v32.cache_bytes(1024).read_per_step == 61 * 1024 * (576 + 128) * 2
    assert v32.attention_flop(8192) == v32.attention_flop(2048)


def test_layers_that_share_picks_keep_no_index_keys():
    assert index_dims("hy_v4", num_hidden_layers=7) == [16, 16, 0, 0, 0, 16, 0]
    assert index_dims("glm_moe_dsa") == [16] * 4
    assert index_dims("glm_moe_dsa", indexer_types=["full", "shared", "shared", "full"]) == [
        16,
        0,
        0,
        16,
    ]
    assert {layer.index_top for layer in layers("hy_v4", **INDEX)} == {8}


@pytest.mark.parametrize(
    ("fields", "dims"),
    [
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, [16, 0, 0, 16, 0, 0, 16]),
        ({"index_topk_freq": 2}, [16, 16, 0, 16, 0, 16, 0]),
        ({"index_topk_pattern": "FFSSFSSF"}, [16, 16, 0, 0, 16, 0, 0]),
        ({"index_topk_pattern": ["full"] * 2 + ["shared"] * 5}, [16, 16, 0, 0, 0, 0, 0]),
        ({"index_topk_pattern": "SSSSSSS", "indexer_types": ["full"] * 7}, [16] * 7),
    ],
)
def test_glm_says_which_layers_have_an_index_in_three_ways(fields, dims):
    assert index_dims("glm_moe_dsa", num_hidden_layers=7, **fields) == dims


def test_kinds_of_layers_that_an_indexed_family_lacks_are_refused():
    refused("layer_types: got 'full_attention'", "deepseek_v32", layer_types=["full_attention"] * 4)
    refused("indexer_types: got 'none'", "hy_v4", indexer_types=["none"] * 4)
    refused("indexer_types: got 3 items", "hy_v4", indexer_types=["full"] * 3)
    refused("index_topk_pattern: got 'X'", "glm_moe_dsa", index_topk_pattern="FFFX")


def test_minimax_m3_picks_blocks_of_ordinary_records():
    heads = {"num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}
    nested = {
        "sparse_attention_freq": [0, 1, 1, 0],
        "sparse_index_dim": 8,
        "sparse_block_size": 4,
        "sparse_topk_blocks": 2,
    }
    config = {"model_type": "minimax_m3_vl_text", "num_hidden_layers": 4, "num_attention_heads": 4}
    spec = sizing.load({**config, **heads, "sparse_attention_config": nested})
    assert [layer.index_dim for layer in spec.layers] == [0, 8, 8, 0]
    assert [layer.index_top for layer in spec.layers] == [None, 8, 8, None]
    assert spec.bytes_per_token() == (4 * 2 * 2 * 16 + 2 * 8) * 2
    # transformers keeps its index keys apart from keys and values.
    held = spec.cache_bytes(29, 2, "f32", definition="hf-dynamic")
    assert (held.allocated, held.state) == (59_392, 3_712)


# --- Windows and shared latents


def test_dots_has_latents_of_two_widths():
    old = {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window_size": 7,
        "swa_num_attention_heads": 2,
        "swa_kv_lora_rank": 30,
        "swa_head_dim": 20,
        "swa_qk_nope_head_dim": 12,
    }
    full, window, *_ = layers("dots3_note_text", **INDEX, **old)
    assert (full.latent_rank, full.rope_dim, full.window, full.index_dim) == (24, 8, None, 16)
    assert (window.latent_rank, window.rope_dim, window.window, window.index_dim) == (30, 8, 7, 0)
    assert window.query_heads == 2


def test_dots_windows_by_layer_of_later_configs():
    later = {
        "layer_types": [
            "indexed_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
        ],
        "per_layer_config": {"2": {"kv_lora_rank": 30}, "03": {"kv_lora_rank": 40}},
        "sliding_window": 9,
    }
    found = layers("dots3_note_text", **INDEX, **later)
    assert [layer.latent_rank for layer in found] == [24, 24, 30, 40]
    assert [layer.index_dim for layer in found] == [16, 0, 0, 0]
    assert [layer.window for layer in found] == [None, None, 9, 9]


def test_dots_without_dsa_has_no_index():
    pattern = layers("dots3_note_text", use_dsa=False, sliding_window=7, num_hidden_layers=6)
    assert [layer.window for layer in pattern] == [None, None, 7, 7, 7, None]
    assert not any(layer.index_dim for layer in pattern)


def test_dots_index_keys_are_f32_in_transformers():
    (layer, *_) = layers("dots3_note_text", **INDEX)
    spec = sizing.ModelSpec("dots3_note_text", 64, (layer,))
    assert spec.cache_bytes(10).allocated == 10 * (24 + 8 + 16) * 2
    assert spec.cache_bytes(10, definition="hf-dynamic").allocated == 10 * ((24 + 8) * 2 + 16 * 4)


def test_mistral_large4_shares_latents_but_not_index_keys():
    spec = sizing.load(
        {
            "model_type": "mistral_large4_text",
            **TINY,
            **INDEX,
            "num_hidden_layers": 8,
            "kv_source_layers": [0, 1, 0, 3, 0, 5, 5, 3],
            "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0],
            "index_topk_freq": 2,
        }
    )
    # Full indexes in layers 0, 1, 3, 5, 7; the last reads the latent of layer 3, without rope.
    assert spec.bytes_per_token("f32") == (3 * (24 + 8 + 16) + (24 + 16) + 16) * 4
    held = spec.cache_bytes(29, 2, "f32", definition="hf-dynamic")
    assert (held.allocated, held.state) == (46_400, 0)
    # All 8 layers read 8 records, 2 of them without rope; 5 indexes read all 29 keys.
    read = spec.cache_bytes(29, codec="f32").read_per_step
    assert read == (8 * (6 * 32 + 2 * 24) + 5 * 29 * 16) * 4
    assert [layer.query_rank for layer in spec.layers] == [None] * 9


def test_mistral_large4_leaves_rope_out_of_each_fourth_layer():
    found = layers("mistral_large4_text", **INDEX)
    assert [layer.rope_dim for layer in found] == [8, 8, 8, 0]
    assert {layer.key_dim for layer in found} == {20}


def test_sources_of_latents_are_checked():
    refused("kv_source_layers: got 3", "mistral_large4_text", kv_source_layers=[0, 3, 2, 3])
    refused("kv_source_layers: got 1", "mistral_large4_text", kv_source_layers=[0, 0, 1, 3])
    refused("kv_source_layers: got 2 items", "mistral_large4_text", kv_source_layers=[0, 1])
    refused(r"layers\[3\].rope_dim", "mistral_large4_text", kv_source_layers=[0, 1, 2, 0])


# --- Absorbed and expanded


@pytest.mark.parametrize("heads", [16, 128])
def test_absorbed_mla_does_many_products_a_byte_and_expanded_mla_few(heads):
    spec = sizing.load({**V3, "num_attention_heads": heads})
    assert spec.intensity() == pytest.approx(heads * (2 * 512 + 64) / (512 + 64))
    assert spec.expanded().intensity() == pytest.approx(1)
    assert spec.expanded().bytes_per_token() == 61 * heads * (192 + 128) * 2


def test_absorbed_mla_of_128_heads_lies_between_two_ridges():
    intensity = sizing.load(V3).intensity()
    assert round(intensity) == 242
    assert sizing.CHIPS["H200"].ridge < intensity < sizing.CHIPS["H100-SXM"].ridge
