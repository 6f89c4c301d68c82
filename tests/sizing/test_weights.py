"""Parameters counted from a config, against those of real models.

`n_params` of the records beside this file were counted by transformers 5.24 on the models
themselves (see `test_measured.py`).
"""

import itertools
import json
import re
from pathlib import Path

import pytest

from kvjax import sizing
from kvjax.sizing.families import WRAPPERS
from kvjax.sizing.weights import Experts, Weights, precision
from kvjax.sizing.weights.tables import RULES

HERE = Path(__file__).parent
PUBLISHED = {
    record["name"]: record
    for record in json.loads((HERE / "published.json").read_text())["models"]
    if "n_params_counted" in record
}
TINY = json.loads((HERE / "measured_tiny.json").read_text())["records"]
TINY_BY_NAME = {record["name"]: record for record in TINY}
FAMILIES = json.loads((HERE / "hf_families.json").read_text())

# Parameters of these models' vision towers and projectors, which are no part of the decoder.
VISION = {
    "Qwen3-VL-4B": 415_347_712,
    "Qwen3-VL-32B": 595_266_800,
    "Gemma-3-27B": 423_060_336,
    "Gemma-4-E2B": 168_544_256,
    "gemma3_mm": 23_424,
    "llava_mm": 20_240,
    "qwen3_vl_mm": 143_408,
}
# What transformers' classes have beyond the architecture:
EXCESS = {
    # Kimi Linear's published config does not list its KDA layers, without which the class takes
    # 6 layers for MLA where the model has 7.
    "Kimi-Linear-48B-A3B": 10_399_392,
    # MPT's multi-query attention is given K and V projections for all heads.
    "mpt_mqa": 4 * 2 * 64 * (64 - 16),
    "mpt/mqa": 4 * 2 * 64 * (64 - 16),
}

# Records that say too little or count too much.
INCOMPARABLE = {
    "dbrx": "the record leaves out what `ffn_config` says",
    "encoder-decoder": "the record counts the encoder",
    "speech-encoder-decoder": "the record counts the encoder",
    "vision-encoder-decoder": "the record counts the encoder",
    "florence2": "the record counts the vision tower, and not its config",
}


def counted(record: dict, *, whole: bool = True) -> sizing.ModelSpec:
    """The record's spec, of which the weights must be known if its family has a rule.

    Args:
        record: what was measured.
        whole: whether the record's config states all sizes.
    """
    model_type = record["config"]["model_type"]
    if model_type not in {*RULES, *WRAPPERS}:
        pytest.skip("no rule for the parameters of this family")
    spec = sizing.load(record["config"])
    if spec.weights is None:
        assert model_type in WRAPPERS or not whole
        pytest.skip("the config does not tell them, or its decoder has no rule")
    return spec


def count_of_part(spec: sizing.ModelSpec) -> set[int]:
    """What the text part of a wrapper counts when run by itself.

    It may have no output head then, or one that the wrapper ties and the part does not.
    """
    head = spec.weights.head
    return {spec.parameters, spec.parameters - head, spec.parameters + head}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    record = PUBLISHED[name]
    found = sizing.load(record["config"]).parameters
    assert found + VISION.get(name, 0) + EXCESS.get(name, 0) == record["n_params_counted"]


def by_name(records: list[dict]) -> list:
    return [
        pytest.param(record, id=str(record.get("name", record["config"]["model_type"])))
        for record in records
    ]


def idle_rows(spec: sizing.ModelSpec) -> int:
    """Rows that transformers gives LongCat's choices which compute nothing, in gate and up."""
    return sum(
        2
        * experts.layers
        * ((experts.choices or experts.count) - experts.count)
        * experts.each
        // 3
        for experts in spec.weights.experts
    )


@pytest.mark.parametrize("record", by_name(TINY))
def test_tiny_models(record):
    spec, name = counted(record), record["name"]
    beyond = VISION.get(name, 0) + EXCESS.get(name, 0) + idle_rows(spec)
    assert spec.parameters + beyond == record["n_params"]


def check(record: dict, spec: sizing.ModelSpec) -> None:
    if record["config"]["model_type"] in WRAPPERS:
        assert record["n_params"] in count_of_part(spec)
    else:
        beyond = EXCESS.get(record.get("name"), 0) + idle_rows(spec)
        assert spec.parameters + beyond == record["n_params"]


@pytest.mark.parametrize("record", by_name(FAMILIES["records"]))
def test_more_families(record):
    model_type = record["config"]["model_type"]
    if model_type in INCOMPARABLE:
        pytest.skip(INCOMPARABLE[model_type])
    if record["name"].endswith("/decoder"):
        pytest.skip("the class keeps cross-attention that nothing feeds")
    check(record, counted(record))


@pytest.mark.parametrize("record", by_name(FAMILIES["defaults"]))
def test_defaults_of_families(record):
    check(record, counted(record, whole=False))


def test_families_with_a_rule_do_not_get_fewer():
    assert len(RULES) >= 195
    assert set(RULES) <= set(sizing.READERS)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # Elements of the tensors in the published checkpoints.
        (
            {  # ChatGLM2-6B
                "model_type": "chatglm",
                "add_bias_linear": False,
                "add_qkv_bias": True,
                "ffn_hidden_size": 13_696,
                "hidden_size": 4096,
                "kv_channels": 128,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
                "num_attention_heads": 32,
                "num_layers": 28,
                "padded_vocab_size": 65_024,
            },
            6_243_584_000,
        ),
        (
            {  # DeepSeekMoE-16B
                "model_type": "deepseek",
                "first_k_dense_replace": 1,
                "hidden_size": 2048,
                "intermediate_size": 10_944,
                "moe_intermediate_size": 1408,
                "moe_layer_freq": 1,
                "n_routed_experts": 64,
                "n_shared_experts": 2,
                "num_attention_heads": 16,
                "num_experts_per_tok": 6,
                "num_hidden_layers": 28,
                "num_key_value_heads": 16,
                "tie_word_embeddings": False,
                "vocab_size": 102_400,
            },
            16_375_728_128,
        ),
        (
            {  # Baichuan2-7B
                "model_type": "baichuan",
                "hidden_size": 4096,
                "intermediate_size": 11_008,
                "num_attention_heads": 32,
                "num_hidden_layers": 32,
                "vocab_size": 125_696,
            },
            7_505_973_248,
        ),
        (
            {  # MiniCPM-2B, whose class ties the head where the config says nothing
                "model_type": "minicpm",
                "hidden_size": 2304,
                "intermediate_size": 5760,
                "num_attention_heads": 36,
                "num_hidden_layers": 40,
                "num_key_value_heads": 36,
                "vocab_size": 122_753,
            },
            2_724_880_896,
        ),
    ],
)
def test_families_that_transformers_has_no_class_for(config, parameters):
    assert sizing.load(config).parameters == parameters


def test_blocks_found_by_search():
    """Two blocks of Nemotron-NAS: one plain, one without attention and with a narrow layer."""
    blocks = [
        {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 3.0}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 0.75}},
    ]
    config = {
        "model_type": "nemotron-nas",
        "block_configs": blocks,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "vocab_size": 32,
    }
    spec = sizing.load(config)
    assert spec.attention_parameters == 2 * 512 * 512 + 2 * 512 * 128
    assert spec.weights.ffn == 3 * 512 * (1024 + 256)
    assert spec.weights.small == 512 * (2 + 1 + 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mlp_only_layers": 3}, "mlp_only_layers: got 3; accepted: a list"),
        ({"num_experts": -1}, "num_experts: got -1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: got 'no'; accepted: true or false"),
        (
            {"intermediate_size": [16]},
            "intermediate_size: got 1 items; accepted: one for each of 2",
        ),
    ],
)
def test_fields_of_weights_are_named_where_they_are_wrong(fields, message):
    config = {
        **{name: value for name, value in MIXTRAL.items() if name != "num_local_experts"},
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "mlp_only_layers": [0],
    }
    assert sizing.load(config).weights.ffn == 3 * 8 * 16
    with pytest.raises(ValueError, match=re.escape(message)):
        sizing.load({**config, **fields})


# --- what a step reads


def test_a_dense_model_reads_all_but_table_rows_whatever_the_batch():
    spec = sizing.load(PUBLISHED["Llama-3.3-70B"]["config"])
    tokens = 128_256 * 8192
    assert spec.parameters_read() == spec.parameters_read(1000) == spec.parameters - tokens
    assert spec.parameters_active == spec.parameters_read()


def test_experts_expected_to_be_needed():
    """E (1 - (1 - k/E)^B): of 4 experts, 2 for each of 2 tokens need 3 in the mean."""
    experts = Experts(count=4, per_token=2, each=10, layers=3)
    assert experts.total == 120
    assert experts.active == experts.read(1) == 60
    assert experts.read(2) == 3 * 30
    assert experts.read(1000) == pytest.approx(120)


def test_choices_that_compute_nothing_need_no_experts():
    assert Experts(count=4, per_token=2, each=10, choices=8).read(1) == 4 * 10 / 4


def test_every_pick_of_two_tokens_counted():
    """The closed form is the mean over all picks of k of E experts by two tokens."""
    picks = [set(pick) for pick in itertools.combinations(range(5), 2)]
    needed = [len(one | other) for one in picks for other in picks]
    mean = sum(needed) / len(needed)
    assert Experts(count=5, per_token=2, each=1).read(2) == pytest.approx(mean)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # In billions, as published; embeddings that are looked up are not counted as active.
        ("gpt-oss-20b", 20.91, 3.61),  # OpenAI (2025), gpt-oss model card, table 1
        ("gpt-oss-120b", 116.83, 5.13),
        ("DeepSeek-V3 / R1", 671, 37),  # DeepSeek-AI (2024)
        ("Kimi-K2", 1026, 32),  # Kimi Team (2025): 1.04T with what is left out here
        ("Mixtral-8x22B", 141, 39),  # Mistral AI (2024)
        ("Jamba-1.5-Large (398B)", 398, 94),  # AI21 (2024)
        ("DBRX (132B)", 132, 36),  # Databricks (2024)
    ],
)
def test_published_totals_and_active_parameters(name, total, active):
    spec = sizing.load(PUBLISHED[name]["config"])
    digits = [0 if isinstance(figure, int) else 2 for figure in (total, active)]
    assert round(spec.parameters / 1e9, digits[0]) == pytest.approx(total, abs=1)
    assert round(spec.parameters_active / 1e9, digits[1]) == pytest.approx(active)


def test_parameters_read_grow_with_the_batch_to_all_experts():
    spec = sizing.load(PUBLISHED["DeepSeek-V3 / R1"]["config"])
    read = [spec.parameters_read(batch) for batch in (1, 2, 16, 256, 10**6)]
    assert read == sorted(read)
    assert read[0] == spec.parameters_active
    assert read[-1] == spec.parameters - 129_280 * 7168
    # The expected share of 256 experts that 16 tokens of 8 each need.
    share = 1 - (1 - 8 / 256) ** 16
    (experts,) = spec.weights.experts
    assert experts.total == 58 * 256 * 3 * 7168 * 2048
    assert read[2] == read[-1] - experts.total + round(experts.total * share)


def test_weights_add_up_and_merge_layers_that_are_alike():
    one = Weights(ffn=1, head=2, lookup=3, small=4, shared=5, mixers=6, experts=(Experts(4, 1, 7),))
    two = one + one
    assert (two.total, two.routed) == (2 * (21 + 28), 2 * 28)
    assert two.experts == (Experts(4, 1, 7, layers=2),)
    assert (one + Weights(projections=3) + Weights(projections=4)).projections == 7


# --- bytes


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("f32", 32),
        ("bf16", 16),
        ("fp8", 8 + 32 / 128**2),
        ("int8", 8),
        ("int4", 4 + 20 / 128),
        ("mxfp4", 4.25),
        ("nvfp4", 4.5),
    ],
)
def test_bits_of_a_parameter(name, bits):
    assert precision(name).itemsize * 8 == bits
    assert precision(name).source


def test_quantised_weights_keep_head_tables_and_norms_in_16_bits():
    spec = sizing.load(PUBLISHED["Llama-3.3-70B"]["config"])
    matrices = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28_672)
    kept = spec.parameters - matrices
    assert spec.weight_bytes("int8") == matrices + 2 * kept
    assert spec.weight_bytes("bf16") == 2 * spec.parameters
    assert spec.weight_bytes("f32") == 4 * spec.parameters
    assert spec.weight_bytes_read(7, "int8") == matrices + 2 * (kept - 128_256 * 8192)


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_mxfp4_checkpoints_of_gpt_oss(name, gib):
    """The model card's checkpoint sizes: experts in 4.25 bits, all else in 16."""
    spec = sizing.load(PUBLISHED[name]["config"])
    assert spec.weight_bytes("mxfp4") / 2**30 == pytest.approx(gib, abs=0.1)


def test_mxfp4_covers_the_layers_of_a_model_without_experts():
    spec = sizing.load(PUBLISHED["Llama-2-7B"]["config"])
    matrices = spec.attention_parameters + spec.weights.ffn
    kept = spec.parameters - matrices
    assert spec.weight_bytes("mxfp4") == matrices * 17 // 32 + 2 * kept


def test_a_step_reads_the_experts_it_needs_in_their_own_precision():
    spec = sizing.load(PUBLISHED["gpt-oss-20b"]["config"])
    experts = spec.weights.routed_read(3)
    rest = spec.parameters_read(3) - experts
    assert spec.weight_bytes_read(3, "mxfp4") == pytest.approx(experts * 17 / 32 + 2 * rest, abs=2)
    floor = spec.decode_floor("H200", 1, 3, weight_codec="mxfp4")
    memory = spec.weight_bytes_read(3, "mxfp4") + spec.cache_bytes(1, 3).read_per_step
    assert floor.ceilings["memory"] == pytest.approx(memory / 4.8e12)


def test_unknown_precisions_are_refused():
    spec = sizing.load(PUBLISHED["Llama-2-7B"]["config"])
    with pytest.raises(ValueError, match="weights: got 'int3'; accepted: f32, bf16"):
        spec.weight_bytes("int3")
    assert spec.weight_bytes("fp16") == spec.weight_bytes("f16")


# --- what a config does not say

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 32,
}


def test_a_mixture_of_experts_by_hand():
    spec = sizing.load(MIXTRAL)
    assert spec.attention_parameters == 2 * (2 * 8 * 8 + 2 * 8 * 4)
    assert spec.weights == Weights(
        head=32 * 8,
        lookup=32 * 8,
        small=2 * (4 * 8 + 2 * 8) + 8,
        experts=(Experts(count=4, per_token=2, each=3 * 8 * 16, layers=2),),
    )


@pytest.mark.parametrize("name", ["vocab_size", "num_local_experts", "intermediate_size"])
def test_weights_are_unknown_without_a_size(name):
    config = {field: value for field, value in MIXTRAL.items() if field != name}
    spec = sizing.load(config)
    assert spec.weights is None
    assert spec.bytes_per_token() == 2 * 2 * 4 * 2
    with pytest.raises(ValueError, match="weights: the spec has none"):
        _ = spec.parameters_active


def test_sizes_of_a_nested_config_are_its_classs_defaults():
    """LLaVA-1.5 leaves out of text_config what equals LLaMA's defaults."""
    nested = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32_064}}
    spec = sizing.load(nested)
    assert spec.parameters == PUBLISHED["Llama-2-7B"]["n_params_counted"] + 2 * 64 * 4096


def test_a_model_around_the_decoder_ties_the_head():
    text = {**MIXTRAL, "model_type": "qwen2", "tie_word_embeddings": False}
    untied = sizing.load({"model_type": "llava", "text_config": text})
    tied = sizing.load({"model_type": "llava", "text_config": text, "tie_word_embeddings": True})
    assert untied.parameters - tied.parameters == 32 * 8


def test_a_family_without_a_rule_has_no_weights():
    spec = sizing.load(TINY_BY_NAME["auto_inkling_text"]["config"])
    assert spec.weights is None


def test_an_encoder_is_held_and_not_read():
    spec = sizing.load(TINY_BY_NAME["bart"]["config"])
    assert spec.weights.encoder > 0
    held = spec.weights.encoder + spec.weights.lookup
    assert spec.parameters_read() == spec.parameters - held
    assert spec.weight_bytes("f32") - spec.weight_bytes_read(1, "f32") == 4 * held
