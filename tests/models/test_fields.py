"""Fields of config.json: both spellings, defaults, and refusals."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvjax.models.fields import FULL, SLIDING, read_rope
from kvjax.models.registry import read_decoder
from kvjax.nn import DecoderConfig, LinearScaling, Llama3Scaling, MoeConfig, YarnScaling

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/ref.npz"))


def config_of(name: str, file: str = "config.json") -> dict:
    return json.loads((GOLDEN / name / file).read_text())


def decoder_of(config: dict) -> DecoderConfig:
    return replace(read_decoder(config)[1], source="")


@pytest.mark.parametrize("name", NAMES)
def test_old_spelling_and_defaults(name):
    """transformers made the model from the sparse config and wrote the full one beside it."""
    assert decoder_of(config_of(name, "config_v4.json")) == decoder_of(config_of(name))


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("gpt2")])
def test_rope_frequencies_are_those_of_transformers(name):
    reference = np.load(GOLDEN / name / "ref.npz")
    layers = decoder_of(config_of(name)).attention
    rotated = [layer for layer in layers if layer.rope is not None]
    assert len(rotated) == len(layers) or name.startswith("cohere2")
    for layer in rotated:
        rope, kind = layer.rope, ""
        if "inv_freq" not in reference:  # each kind of layer has its own
            kind = f"{FULL if layer.window is None else SLIDING}_"
        inv_freq = reference[f"{kind}inv_freq"]
        assert rope.dim == 2 * len(inv_freq)
        assert rope.frequencies().dtype == np.float32
        # The same bits, or with a scaling all but the last one.
        np.testing.assert_allclose(rope.frequencies(), inv_freq, rtol=1.2e-7 if rope.scaling else 0)
        magnitude = 1.0 if rope.scaling is None else rope.scaling.magnitude
        assert magnitude == pytest.approx(float(reference[f"{kind}rope_magnitude"]), rel=1e-12)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({}, 1e4, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4, LinearScaling(2.0)),
        ({"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}, 100.0, None),
        (
            {"rope_theta": 500.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            500.0,
            LinearScaling(2.0),
        ),
        (
            {"rope_scaling": {"rope_type": "default"}, "rope_parameters": LLAMA3},
            1e4,
            None,
        ),
        ({"rope_scaling": LLAMA3}, 1e4, Llama3Scaling(8.0, 1, 4, original_max_positions=64)),
        ({"rope_scaling": YARN}, 1e4, YarnScaling(4.0, 16, 0.1 * np.log(4) + 1)),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 32},
            1e4,
            YarnScaling(4.0, 32, 0.1 * np.log(4) + 1),
        ),
        (
            {"rope_scaling": {**YARN, "factor": None}},
            1e4,
            YarnScaling(4.0, 16, 0.1 * np.log(4) + 1),
        ),
        ({"rope_scaling": {**YARN, "attention_factor": 1.5}}, 1e4, YarnScaling(4.0, 16, 1.5)),
    ],
    ids=str,
)
def test_rope_as_transformers_reads_it(fields, theta, scaling):
    """Each row was compared with the rope_parameters, frequencies and factor of transformers."""
    rope = read_rope({"max_position_embeddings": 64, **fields}, 16)
    assert (rope.theta, rope.dim, rope.scaling) == (theta, 16, scaling)


@pytest.mark.parametrize(
    ("factor", "mscale", "mscale_all_dim", "magnitude"),
    [(40.0, 0.707, 0.707, 1.0), (40.0, 1.0, 0.5, 1.3688879 / 1.1844440), (0.5, 1.0, 0.5, 1.0)],
)
def test_yarn_magnitude(factor, mscale, mscale_all_dim, magnitude):
    scaling = {**YARN, "factor": factor, "mscale": mscale, "mscale_all_dim": mscale_all_dim}
    rope = read_rope({"max_position_embeddings": 64, "rope_scaling": scaling}, 16)
    assert rope.scaling.magnitude == pytest.approx(magnitude, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama_bias", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type='dynamic'"),
        ("llama_bias", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ("llama_bias", {"rope_scaling": {"type": "linear"}}, "llama lacks 'factor'"),
        ("phi3_fused", {"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type='su'"),
        ("phi3_fused", {"rope_scaling": YARN}, "phi3 knows no scaling but longrope"),
        (
            "gemma_mqa",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention=True: accepted are False",
        ),
        (
            "gemma2_window",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention=True: accepted are False",
        ),
        (
            "gemma3_pattern",
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping=50.0: accepted are None",
        ),
        (
            "gemma3_pattern",
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters: got rope_type; accepted: full_attention and sliding_attention",
        ),
        (
            "qwen2_window",
            {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
            "got those of full_attention; accepted: those of sliding_attention too",
        ),
        ("gpt_oss_window", {"num_experts_per_tok": 7}, "chosen: got 7; accepted: 1 to 6"),
        ("mixtral_gqa", {"hidden_act": "mish"}, "hidden_act='mish'"),
        ("qwen3_moe_window", {"num_experts_per_tok": 10}, "chosen: got 10; accepted: 1 to 9"),
        (
            "minicpm3_longrope",
            {"max_position_embeddings": 128},
            "max_position_embeddings: got 128 with longrope, .* longer than 64; accepted: up to 64",
        ),
        ("deepseek_v2_lite", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek_v2_lite", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        (
            "deepseek_v2_lite",
            {"use_mla": False, "head_dim": None, "qk_head_dim": None},
            "use_mla=False",
        ),
        ("deepseek_v2_lite", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3_groups", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3_groups", {"rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_v3_groups", {"topk_group": 5}, "groups.kept: got 5; accepted: 1 to 4"),
        ("gpt2_conv1d", {"add_cross_attention": True}, "layer 1 of gpt2: cross is True"),
        ("gpt2_conv1d", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ("gpt2_conv1d", {"activation_function": "mish"}, "activation_function='mish'"),
    ],
    ids=str,
)
def test_what_would_be_silently_wrong_is_refused(name, fields, message):
    with pytest.raises(ValueError, match=message):
        read_decoder(config_of(name) | fields)


@pytest.mark.parametrize(
    ("factor", "mscale", "softmax_scale"),
    [(40.0, 0.707, 0.1147214), (40.0, 1.0, 0.1352338), (32.0, 1.0, 0.1308608)],
    ids=["DeepSeek-V2-Lite", "DeepSeek-V3", "Kimi-K2"],
)
def test_yarn_of_published_latent_attention(factor, mscale, softmax_scale):
    """Its temperature is squared in the scale of scores, over all 192 channels, and not in RoPE."""
    config = config_of("deepseek_v3_groups") | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    config["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }
    for layer in decoder_of(config).attention:
        assert layer.factor == pytest.approx(softmax_scale, abs=5e-8)
        assert layer.rope.scaling.magnitude == 1.0
    del config["rope_parameters"]["mscale"], config["rope_parameters"]["mscale_all_dim"]
    layer = decoder_of(config).attention[0]
    assert layer.factor == pytest.approx(192**-0.5)
    assert layer.rope.scaling.magnitude == pytest.approx(0.1 * np.log(factor) + 1)


def test_rope_by_kind_of_layer():
    """Values and defaults as transformers has them, in either spelling."""
    sparse = config_of("gemma3_pattern", "config_v4.json")
    for field in ("rope_theta", "rope_local_base_freq", "rope_scaling"):
        del sparse[field]
    window, _, full, _ = decoder_of(sparse).attention
    assert (window.rope.theta, full.rope.theta) == (1e4, 1e6)
    both = {"sliding_attention": {"rope_theta": 3.0}, "full_attention": None}
    window, _, full, _ = decoder_of(sparse | {"rope_theta": 7.0, "rope_parameters": both}).attention
    assert (window.rope.theta, full.rope.theta) == (3.0, 7.0)


def test_only_gemma_reads_gelu_as_its_tanh_form():
    assert decoder_of(config_of("gemma_mqa") | {"hidden_act": "gelu"}).mlp.activation == "gelu_tanh"
    assert decoder_of(config_of("llama_mha") | {"hidden_act": "gelu"}).mlp.activation == "gelu"


def test_embeddings_are_tied_by_default_only_where_the_family_says():
    tied = {}
    for name in NAMES:
        config = config_of(name)
        del config["tie_word_embeddings"]
        tied[config["model_type"]] = decoder_of(config).tied
    by_default = {"gemma", "gemma2", "gemma3_text", "cohere2", "gpt2", "minicpm3"}
    assert {family for family, is_tied in tied.items() if is_tied} == by_default


@pytest.mark.parametrize(
    ("fields", "sparse"),
    [
        ({}, [True, False, True]),
        ({"mlp_only_layers": None}, [True, True, True]),
        ({"mlp_only_layers": None, "decoder_sparse_step": 2}, [False, True, False]),
        ({"decoder_sparse_step": 3}, [False, False, True]),
        ({"mlp_only_layers": [0, 2], "decoder_sparse_step": None}, [False, True, False]),
    ],
    ids=str,
)
def test_which_layers_of_qwen3_moe_have_experts(fields, sparse):
    """As Qwen3MoeDecoderLayer of transformers chooses."""
    decoder = decoder_of(config_of("qwen3_moe_dense_between") | fields)
    assert [isinstance(mlp, MoeConfig) for mlp in decoder.feed_forward] == sparse


def test_experts_are_counted_under_either_name():
    config = config_of("qwen3_moe_dense_between")
    config["num_experts"] = config.pop("num_local_experts")
    assert decoder_of(config) == decoder_of(config_of("qwen3_moe_dense_between"))
