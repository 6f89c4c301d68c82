"""What each family's config means, field by field, and what is refused."""

import json
import math

import pytest

from kvjax import sizing
from kvjax.sizing import load

PLAIN = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "vocab_size": 128,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 8}
FULL, SLIDING = "full_attention", "sliding_attention"


def config(model_type: str, **fields) -> dict:
    return {"model_type": model_type, **PLAIN, **fields}


def without(given: dict, *names: str) -> dict:
    return {name: value for name, value in given.items() if name not in names}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2"])
def test_null_kv_heads_mean_mha(model_type):
    assert load(config(model_type, num_key_value_heads=None)).layers[0].kv_heads == 8


@pytest.mark.parametrize(
    ("model_type", "kv_heads"), [("llama", 8), ("phi3", 8), ("olmo2", 8), ("mistral", 8)]
)
def test_absent_kv_heads_are_the_familys_default(model_type, kv_heads):
    assert load(config(model_type)).layers[0].kv_heads == kv_heads


@pytest.mark.parametrize(("model_type", "default"), [("qwen2", 32), ("qwen3", 32), ("gemma", 16)])
def test_a_default_that_does_not_fit_the_query_heads_is_refused(model_type, default):
    with pytest.raises(ValueError, match=f"num_key_value_heads: got {default}"):
        load(config(model_type))
    assert load(config(model_type, num_attention_heads=32, hidden_size=64 * default)).layers


@pytest.mark.parametrize(
    ("model_type", "head_dim"),
    [
        ("llama", 8),
        ("mistral", 8),
        ("qwen2", 8),
        ("phi3", 8),
        ("olmo2", 8),
        ("qwen3", 128),
        ("gemma", 256),
    ],
)
def test_head_dim(model_type, head_dim):
    plain = config(model_type, num_key_value_heads=2)
    assert load(plain).layers[0].key_dim == head_dim
    assert load({**plain, "head_dim": 24}).layers[0].value_dim == 24


def test_families_without_a_head_dim_refuse_one():
    for given in (GPT2, config("gpt_neox")):
        assert load(given).layers[0].key_dim == 8
        with pytest.raises(ValueError, match="head_dim: got 8; accepted for gpt"):
            load({**given, "head_dim": 8})


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, [4096] * 4),
        ({"sliding_window": None}, [None] * 4),
        ({"sliding_window": 8}, [8] * 4),
    ],
)
def test_windows_of_mistral(fields, windows):
    assert [layer.window for layer in load(config("mistral", **fields)).layers] == windows


def test_windows_of_phi3():
    assert load(config("phi3")).layers[0].window is None
    assert load(config("phi3", sliding_window=2047)).layers[3].window == 2047


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 16, "max_window_layers": 0}, [None] * 4),
        ({"sliding_window": 16, "use_sliding_window": True}, [None] * 4),
        (
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},
            [None, None, None, 16],
        ),
        ({"use_sliding_window": True, "max_window_layers": 0}, [4096] * 4),
        (
            {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
            [None] * 4,
        ),
        (
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": [SLIDING, FULL, FULL, SLIDING],
            },
            [16, None, None, 16],
        ),
    ],
)
def test_windows_of_qwen(model_type, fields, windows):
    given = config(model_type, num_key_value_heads=2, **fields)
    assert [layer.window for layer in load(given).layers] == windows


def test_own_families_have_kv_heads():
    pooled = {**GPT2, "model_type": "kvjax_gpt2", "num_key_value_heads": 2}
    assert load(pooled).layers[0].kv_heads == 2
    assert load(config("kvjax_gpt_neox", num_key_value_heads=4)).layers[0].kv_heads == 4
    with pytest.raises(ValueError, match="num_key_value_heads: absent"):
        load(without(pooled, "num_key_value_heads"))
    with pytest.raises(ValueError, match="num_key_value_heads: got 2; accepted for gpt2"):
        load({**GPT2, "num_key_value_heads": 2})


def test_pooling_gpt2_saves_exactly_the_projections():
    whole = {**GPT2, "vocab_size": 100, "n_positions": 32}
    pooled = {**whole, "model_type": "kvjax_gpt2", "num_key_value_heads": 2}
    # In each of 4 layers 6 heads of 8, for K and for V, over 64 inputs and a bias.
    assert load(whole).parameters - load(pooled).parameters == 4 * 2 * 6 * 8 * (64 + 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (PLAIN, "model_type: got None; accepted: one of [0-9]+ families"),
        (config("lama"), "model_type: got 'lama'; accepted: .*, such as llama"),
        (config(["llama"]), "model_type: got"),
        (without(config("llama"), "hidden_size"), "hidden_size: absent"),
        (without(config("llama"), "num_hidden_layers"), "num_hidden_layers: absent"),
        (without(config("llama"), "num_attention_heads"), "num_attention_heads: absent"),
        (config("llama", num_attention_heads=0), "num_attention_heads: got 0; accepted: a whole"),
        (config("llama", num_attention_heads=-8), "num_attention_heads: got -8"),
        (config("llama", num_attention_heads=True), "num_attention_heads: got True"),
        (config("llama", num_attention_heads="8"), "num_attention_heads: got '8'"),
        (config("llama", num_hidden_layers=0), "num_hidden_layers: got 0"),
        (config("llama", num_attention_heads=7), "num_attention_heads: got 7 with hidden_size 64"),
        (config("llama", num_key_value_heads=3), "num_key_value_heads: got 3"),
        (config("llama", num_key_value_heads=16), "num_key_value_heads: got 16"),
        (config("llama", num_key_value_heads=0), "num_key_value_heads: got 0"),
        (config("llama", head_dim=45.0), "head_dim: got 45.0; accepted: a whole number"),
        (config("qwen3", num_key_value_heads=2, head_dim=None), "head_dim: got null"),
        (config("gemma", num_key_value_heads=None), "num_key_value_heads: got null"),
        (config("llama", attention_bias="no"), "attention_bias: got 'no'"),
        (config("mistral", sliding_window=0), "sliding_window: got 0"),
        (config("mistral", sliding_window=8.0), "sliding_window: got 8.0"),
        (config("mistral", layer_types=[FULL] * 4), "layer_types: got"),
        (config("llama", sliding_window=4096), "sliding_window: got 4096; accepted for llama"),
        (config("llama", num_kv_shared_layers=2), "num_kv_shared_layers: got 2"),
        (config("llama", kv_lora_rank=512), "kv_lora_rank: got 512"),
        (config("llama", num_kv_heads=2), "num_kv_heads: got 2"),
        (config("llama", n_kv_heads=2), "n_kv_heads: got 2; accepted for llama: absent"),
        (config("llama", text_config={"hidden_size": 8}), "text_config: got"),
        (config("llama", add_cross_attention=True), "add_cross_attention: got True"),
        ({**GPT2, "n_head": 7}, "n_head: got 7 with n_embd 64"),
        (
            config("qwen2", num_key_value_heads=2, layer_types=[FULL]),
            "layer_types: got .* one name for each of 4 layers",
        ),
        (
            config("qwen2", num_key_value_heads=2, layer_types=[SLIDING] * 4),
            "layer_types: got 'sliding_attention'; accepted for qwen2: full_attention",
        ),
        (
            config("qwen2", num_key_value_heads=2, layer_types=[["full_attention"]] * 4),
            "layer_types: got",
        ),
        (config("qwen2", num_key_value_heads=2, use_sliding_window=1), "use_sliding_window: got 1"),
        (config("qwen2", num_key_value_heads=2, max_window_layers=-1), "max_window_layers: got -1"),
        (config("llama", num_hidden_layers=10**30), "num_hidden_layers: got 10+ layers; accepted"),
        (config("hrm_text", H_cycles=10**30), "H_cycles, L_cycles: got"),
        (config("inkling2_loop_text", loop_num_passes=10**30), "loop_num_passes: got"),
        (config("t5", d_kv=8, num_decoder_layers=10**30), "num_decoder_layers: got"),
        (config("llama", per_layer_config={"a": {}}), "per_layer_config: got {} for 'a'; accepted"),
        (config("llama", per_layer_config={"0": 1}), "per_layer_config: got 1 for '0'"),
        (config("minimax", attn_type_list=[{}] * 4), "attn_type_list: got"),
        (config("recurrent_gemma", block_types=[[]] * 4), "block_types: got"),
        (config("ernie4_5_moe", moe_layer_interval=0), "moe_layer_interval: got 0"),
        (config("jamba", expert_layer_period=0), "expert_layer_period: got 0"),
        (config("lfm2", block_multiple_of=0), "block_multiple_of: got 0"),
        (config("lfm2", block_ffn_dim_multiplier="1"), "block_ffn_dim_multiplier: got '1'"),
        (config("lfm2", block_ffn_dim_multiplier=math.nan), "block_ffn_dim_multiplier: got nan"),
        (config("xlstm", num_heads=8, qk_dim_factor=math.inf), "qk_dim_factor: got inf"),
        (
            without(config("xlstm", num_heads=8, ffn_proj_factor=None), "num_attention_heads"),
            "ffn_proj_factor: got None",
        ),
        (config("dory", n_recurrent_layers="8"), "n_recurrent_layers: got '8'"),
        (config("step3p5", moe_layers_enum="4,x"), "moe_layers_enum: got '4,x'"),
        (config("llama4_text", interleave_moe_layer_step=0), "interleave_moe_layer_step: got 0"),
    ],
)
def test_refusals_name_the_field(given, message):
    with pytest.raises(ValueError, match=message):
        load(given)


def test_fields_of_other_families_that_are_off_are_no_obstacle():
    off = {"sliding_window": None, "multi_query": False, "num_kv_shared_layers": 0}
    assert load(config("llama", **off)).layers == load(config("llama")).layers


def test_an_explicit_head_dim_needs_no_divisible_width():
    assert load(config("llama", num_attention_heads=7, head_dim=16)).layers[0].key_dim == 16


def test_a_config_without_a_vocabulary_is_sized_but_not_counted():
    spec = load(without(config("llama"), "vocab_size"))
    assert spec.bytes_per_token() == 4 * 2 * 64 * 2
    with pytest.raises(ValueError, match=r"weights: .*vocab_size"):
        _ = spec.parameters


def test_sources_are_equivalent(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config("llama")))
    assert load(file) == load(str(file)) == load(tmp_path) == load(config("llama"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n "model_type": "llama",\n "hidden_size": 64,,\n}', "config.json, line 3, column"),
        (b"[1, 2]", "config.json: got a JSON list"),
        (b'{"a": "\xff"}', "config.json: not a text file"),
        (b"", "config.json, line 1"),
        (b"[" * 10**6, "config.json: nested too deeply"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "config.json: a number of too many digits"),
    ],
)
def test_bad_files(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        sizing.read_config(tmp_path)


@pytest.mark.parametrize("source", [None, 5, ["config.json"]])
def test_sources_that_are_none(source):
    with pytest.raises(ValueError, match=r"source: got .*; accepted: a path"):
        load(source)


def test_a_byte_order_mark_is_no_obstacle(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config("llama")), "utf-8-sig")
    assert load(tmp_path) == load(config("llama"))


def test_a_config_that_holds_itself():
    given = {"model_type": "llava"}
    given["text_config"] = given
    with pytest.raises(ValueError, match="model_type: got 'llava' within 16 others"):
        load(given)


def test_missing_files(tmp_path):
    for path in (tmp_path, tmp_path / "nothing.json"):
        with pytest.raises(FileNotFoundError, match="no such file"):
            sizing.read_config(path)
