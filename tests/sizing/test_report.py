"""A model's figures side by side: all of one device, and of the source and pages asked for."""

import json

import pytest

from kvjax.sizing import CHIPS, load, report
from kvjax.sizing.text import title

LLAMA = load(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    }
)
T5 = load({"model_type": "t5", "d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 64,
           "vocab_size": 100})  # fmt: skip
WEIGHTS = 2 * 6_738_415_616
TOKEN = 524_288


def test_figures_of_shards_stages_and_replicas_are_of_one_device():
    found = report(LLAMA, 1000, 16, chip="H200", tp=2, pp=4, dp=2)
    assert found["bytes_per_token"] == found["bytes_per_token_at_length"] == TOKEN // 8
    assert found["allocated_bytes"] == 8 * 1000 * TOKEN // 8
    # The cache of 8 sequences and the weights of one device, each an eighth of the whole.
    assert found["tokens_where_cache_equals_weights"] == WEIGHTS // (8 * TOKEN)
    on_chip = found["on_chip"]
    free = 141 * 10**9 - WEIGHTS // 8
    assert on_chip["tokens_that_fit_beside_weights"] == free // TOKEN
    floor = LLAMA.decode_floor("H200", 1000, 2, tp=2)  # a stage takes a quarter of 8 sequences
    assert on_chip["decode_floor_seconds"] == floor.seconds
    assert on_chip["tokens_per_second"] == pytest.approx(16 / floor.seconds)


def test_the_source_and_the_pages_count_on_the_chip():
    floor = T5.decode_floor("H200", 10, source_tokens=5000)
    assert report(T5, 10, chip="H200", source_tokens=5000)["on_chip"]["decode_floor_seconds"] == (
        floor.seconds
    )
    paged = report(LLAMA, 10, chip="H200", page_size=1024)["on_chip"]
    exact = report(LLAMA, 10, chip="H200")["on_chip"]["tokens_that_fit_beside_weights"]
    assert paged["tokens_that_fit_beside_weights"] == exact // 1024 * 1024


def test_a_source_that_outweighs_the_weights_leaves_no_tokens():
    found = report(T5, 10, chip="H200", source_tokens=10**9)
    assert found["tokens_where_cache_equals_weights"] == 0
    assert found["on_chip"]["tokens_that_fit_beside_weights"] == 0


def test_states_take_room_on_the_chip():
    mamba = load({"model_type": "jamba", "hidden_size": 64, "num_hidden_layers": 8,
                  "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
                  "vocab_size": 100, "mamba_dt_rank": 4, "num_experts": 2,
                  "num_experts_per_tok": 1})  # fmt: skip
    found = report(mamba, 10, chip="H200")
    free = CHIPS["H200"].memory_bytes - 2 * mamba.parameters - found["state_bytes"]
    assert found["state_bytes"] > 0
    assert found["on_chip"]["tokens_that_fit_beside_weights"] == mamba.tokens_that_fit(free)


def test_the_title_says_what_was_asked_for():
    plain = "1 × 10 tokens, bf16, allocated as by kvjax"
    assert title(report(LLAMA, 10)) == plain
    assert title(report(T5, 10, source_tokens=5000)) == f"{plain}, source of 5,000 tokens"
    spread = report(LLAMA, 10, page_size=16, in_flight=4, tp=2, dp=3)
    assert title(spread) == (
        f"{plain}, pages of 16, 4 tokens in flight; cache of one device of tp 2 × dp 3"
    )


def test_figures_are_json():
    assert json.loads(json.dumps(report(T5, 10, chip="H200"))) == report(T5, 10, chip="H200")
