import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from kvjax import models
from kvjax.bench import decode_step, machine
from kvjax.bench.decode_step import StepCase, Steps, filled_cache, measure, read_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
pytestmark = pytest.mark.usefixtures("quick")
CASE = StepCase("llama", 3, length=10, capacity=12, codec="bf16")


@pytest.fixture(scope="module")
def llama():
    return models.init(LLAMA)


def test_the_step_decodes_the_newest_of_its_tokens(llama):
    cache = filled_cache(llama, CASE)
    assert cache.n.tolist() == [9, 9, 9]
    k = np.asarray(cache.layers[1].operands()["k"])
    assert np.all(np.any(k[:, :, :9] != 0, axis=-1))
    assert not np.any(k[:, :, 9:])
    steps = Steps(llama, CASE)
    logits = steps._step()
    assert logits.shape == (3, 1, 64)
    assert steps._cache.n.tolist() == [10, 10, 10]


def test_every_call_decodes_at_the_same_length(llama, monkeypatch):
    lengths = []

    def step(model, tokens, cache, count):
        lengths.append(cache.n.tolist())
        return decode(model, tokens, cache, count)

    decode = decode_step.engine.decode
    monkeypatch.setattr(decode_step.engine, "decode", step)
    steps = Steps(llama, CASE)
    assert steps(5) > 0
    assert steps(2) > 0
    assert lengths == [[9, 9, 9]] * 7


def test_bytes_are_those_of_the_arrays_that_a_step_reads(llama):
    sizes = {"batch": [3], "length": [10], "capacity": 12, "codec": ["bf16"]}
    figures = measure({"llama": llama}, **sizes, rounds=3)
    (row,) = figures["rows"]
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(llama))
    weights -= llama.embed.embedding.nbytes  # of which it reads the rows of its tokens
    cache = llama.init_cache(3, 10, codec="bf16")
    keys_and_values = sum(x.nbytes for layer in cache.layers for x in layer.leaves.values())
    assert row["bytes_per_step"] == weights + keys_and_values
    # Two FLOP a weight and row (norms included), and q.k and p.v of 4 heads of 8 over 10 tokens.
    attention = 2 * (2 * 4 * 10 * (8 + 8))
    assert row["flop_per_step"] == 3 * (2 * weights // 4 + attention)
    assert row["kv_heads"] == 2
    assert (row["codec"], row["weight_codec"]) == ("bf16", "f32")
    assert row["tokens_per_second"] == 3 / row["median_seconds"]
    assert figures["subject"] == "decode step"


def test_models_at_all_combinations(llama):
    models = {"one": llama, "another": llama}
    sizes = {"batch": [3], "length": [4, 8], "capacity": 12, "codec": ["bf16"]}
    rows = measure(models, **sizes, rounds=3)["rows"]
    assert [(row["model"], row["length"], row["capacity"]) for row in rows] == [
        ("one", 4, 12),
        ("one", 8, 12),
        ("another", 4, 12),
        ("another", 8, 12),
    ]


def test_the_first_token_of_all(llama):
    assert Steps(llama, replace(CASE, length=1))(2) > 0


def test_longer_than_the_capacity():
    with pytest.raises(ValueError, match="length=13: at most the capacity, 12"):
        StepCase("llama", 3, length=13, capacity=12, codec="f32")


def test_reads_a_config_alone_or_a_directory(tmp_path, llama):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    assert read_model(str(config), "bf16").embed.embedding.dtype == "bfloat16"
    models.save(llama, tmp_path / "model")
    loaded = read_model(str(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.embed.embedding[...], llama.embed.embedding[...])


def test_what_does_not_fit_is_refused(tmp_path, llama, monkeypatch):
    monkeypatch.setattr(machine, "free_bytes", lambda: 10_000)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    with pytest.raises(ValueError, match=r"the weights of .*config\.json: 0\.0 GiB are needed"):
        read_model(str(config))
    with pytest.raises(ValueError, match="the caches of all cases"):
        measure({"llama": llama}, batch=[1], length=[128], array_bytes=0)
