"""Published configs, against bytes worked out by hand from what is published about the models.

`published_more.json` says of each model where its config was read and how its bytes follow.
"""

import json
from pathlib import Path

import pytest

from kvjax import sizing

PUBLISHED = json.loads((Path(__file__).parent / "published_more.json").read_text())["models"]
HEADS = {
    "hidden_size": 1024,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
LATENT = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 384,
    "qk_rope_head_dim": 64,
}


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model["name"])
def test_published_models(model):
    spec = sizing.load(model["config"])
    assert spec.bytes_per_token() == model["bytes_per_token"], model["reason"]
    found = spec.cache_bytes(model["tokens"], source_tokens=model.get("source_tokens", 0))
    assert found.allocated == model["allocated"], model["reason"]
    if model["state"] is not None:
        assert found.state == model["state"], model["reason"]


@pytest.mark.parametrize(
    ("published", "sibling", "config"),
    [
        ("GOT", "qwen2", HEADS),
        ("PanguEmbedded", "llama", HEADS),
        ("bailing_moe", "llama", HEADS | {"num_nextn_predict_layers": 1}),
        ("bailing_moe_v2", "qwen3", HEADS | {"head_dim": 64}),
        ("dots_ocr", "qwen2", HEADS | {"use_sliding_window": False, "max_window_layers": 8}),
        ("ernie4_5_moe_vl", "ernie4_5_moe", HEADS),
        ("llava_qwen2", "qwen2", HEADS | {"use_sliding_window": False}),
        ("mimo", "qwen2", HEADS | {"num_nextn_predict_layers": 1}),
        ("minicpmo", "minicpmv", HEADS),
        ("orion", "llama", HEADS),
        ("phi4mm", "phi4_multimodal", HEADS | {"sliding_window": 64}),
        ("telechat3", "llama", HEADS),
        ("youtu_llm", "youtu", LATENT),
    ],
)
def test_names_of_before_or_beside_transformers(published, sibling, config):
    theirs = {name: config[name] for name in config if name != "num_nextn_predict_layers"}
    found, expected = (
        sizing.load({**own, "model_type": name})
        for name, own in ((published, config), (sibling, theirs))
    )
    assert found.layers == expected.layers


@pytest.mark.parametrize(
    ("model_type", "part", "family"),
    [
        ("NVLM_D", "llm_config", "qwen2"),
        ("h2ovl_chat", "llm_config", "mistral"),
        ("lfm2-vl", "text_config", "lfm2"),
        ("maira2", "text_config", "phi3"),
        ("minimax_vl_01", "text_config", "minimax_text_01"),
        ("multi_modality", "language_config", "llama"),
    ],
)
def test_wrappers_with_code_of_their_own(model_type, part, family):
    decoder = HEADS | {"model_type": family}
    if family == "lfm2":
        decoder["layer_types"] = ["conv", "full_attention"] * 5
    found = sizing.load({"model_type": model_type, part: decoder})
    assert found.layers == sizing.load(decoder).layers


def test_step_3_keeps_one_head_for_all_queries():
    # 2507.19427: 61 layers, 64 query heads and one KV head of 256.
    decoder = {"model_type": "step3_text", "hidden_size": 7168, "num_hidden_layers": 61}
    decoder |= {"num_attention_heads": 64, "num_attention_groups": 1, "head_dim": 256}
    spec = sizing.load({"model_type": "step3_vl", "text_config": decoder})
    assert spec.bytes_per_token() == 61 * 2 * 256 * 2
    assert {layer.query_rank for layer in spec.layers} == {2048}


def test_longcat_flash_with_ngrams_has_two_latents_a_layer():
    config = {name: LATENT[name] for name in LATENT if name != "num_hidden_layers"}
    spec = sizing.load({**config, "model_type": "longcat_flash_ngram", "num_layers": 4})
    assert spec.bytes_per_token() == 2 * 4 * (512 + 64) * 2


def test_ring_linear_attends_at_the_end_of_a_group_and_after_the_last_one():
    config = HEADS | {"model_type": "bailing_moe_linear", "num_hidden_layers": 9}
    spec = sizing.load(config | {"layer_group_size": 4})
    attends = [index for index, layer in enumerate(spec.layers) if layer.kind == "attention"]
    assert attends == [3, 7, 8]
    assert spec.cache_bytes(1).state == 6 * 8 * 128 * 128 * 4


@pytest.mark.parametrize(
    ("config", "old"),
    [
        ({"model_type": "qwen", "kv_channels": 128}, ("n_embd", "n_layer", "n_head")),
        (
            {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 8},
            ("hidden_size", "n_layer", "n_head"),
        ),
    ],
)
def test_names_of_gpt_2_beside_the_usual_ones(config, old):
    usual = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    numbers = (4096, 12, 32)
    spelt_old = config | dict(zip(old, numbers, strict=True))
    spelt_new = config | dict(zip(usual, numbers, strict=True))
    expected = sizing.load(spelt_new).layers
    assert sizing.load(spelt_old).layers == expected
    assert sizing.load(spelt_old | spelt_new).layers == expected
    with pytest.raises(ValueError, match="num_attention_heads, n_head"):
        sizing.load(spelt_old | spelt_new | {"n_head": 16})


def test_drafts_keep_where_windows_of_their_target_began():
    config = HEADS | {"model_type": "llama", "max_window_layers": 36, "use_sliding_window": False}
    plain = sizing.load(HEADS | {"model_type": "llama"})
    assert sizing.load(config | {"sliding_window": None}).layers == plain.layers
    with pytest.raises(ValueError, match="sliding_window: got 4096"):
        sizing.load(config | {"sliding_window": 4096})


@pytest.mark.parametrize(
    ("config", "field"),
    [
        # Grok-2 calls itself by the name of another family, with MHA of D / N.
        ({"model_type": "git", "head_dim": 128}, "head_dim"),
        ({"model_type": "git"}, "num_key_value_heads"),
        # Spellings of conversions.
        ({"model_type": "mistral", "sliding_window_size": 4096}, "sliding_window_size"),
        ({"model_type": "llama", "attention_chunk_size": 2048}, "attention_chunk_size"),
        # Windows that no published model of the family has.
        ({"model_type": "bailing_moe", "use_sliding_window": True}, "use_sliding_window"),
        # The decoder's fields in the place of the encoder's.
        ({"model_type": "gemma3"}, "num_hidden_layers"),
        ({"model_type": "step3p7"}, "num_hidden_layers"),
    ],
)
def test_misleading_configs_are_refused(config, field):
    with pytest.raises(ValueError, match=f"^{field}: got"):
        sizing.load(HEADS | config)
