"""What a conversion reports."""

import json

import pytest

from kvjax.convert import Comparison, to_gqa


@pytest.fixture(scope="module")
def report(golden, tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    return to_gqa(golden / "olmo2_mha", directory / "dst", 2, seed=7, evaluate_on=False)


def test_figures(report):
    figures = report.figures()
    sentence = figures.pop("approximations")[0]
    assert "mean square over the channels of fewer heads" in sentence
    # In each of two layers: K and V of 4 heads of 16, two bytes each; k and v of 64 x 64 and a
    # k_norm of 64, which all lose half.
    saved = 2 * (2 * 64 * 32 + 32)
    assert figures == {
        "model_type": "olmo2",
        "kv_heads_before": 4,
        "kv_heads_after": 2,
        "method": "mean",
        "seed": 7,
        "bytes_per_token_before": 2 * 2 * 4 * 16 * 2,
        "bytes_per_token_after": 2 * 2 * 2 * 16 * 2,
        "parameters_before": 64064,
        "parameters_after": 64064 - saved,
        "parameters_saved": saved,
        "comparison": None,
    }


def test_figures_are_json(report):
    assert json.loads(json.dumps(report.figures()))["parameters_saved"] == 8256


def test_rows_hold_every_figure(report):
    rows = dict(report.rows())
    assert rows["KV heads"] == "4 → 2 (mean)"
    assert rows["cache per token, bf16"] == "512 B → 256 B"
    assert rows["saved"] == "8,256"


def test_rows_of_a_comparison():
    comparison = Comparison(2048, 0.51234, 0.25, 2.8, 9.4)
    assert dict(comparison.rows()) == {
        "compared on": "2,048 tokens",
        "KL from the source": "0.5123 nats",
        "same likeliest token": "25.0%",
        "loss": "2.8000 → 9.4000 nats",
    }
    assert "loss" not in dict(Comparison(512, 0.0, 1.0, None, None).rows())
