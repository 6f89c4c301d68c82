"""The error report: its figures against numpy, and what calibration changes in them."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from kvjax.cache import Kivi, Paged, Scales, SinkRing
from kvjax.engine import calibrate, codec_error, decode
from kvjax.engine.codec_error import COLUMNS
from kvjax.nn import AttentionConfig, Rope

PLAIN = AttentionConfig(
    32, query_heads=4, kv_heads=2, key_dim=8, value_dim=4, rope=Rope(8, theta=100.0)
)
LAYERS = (PLAIN, PLAIN, replace(PLAIN, shares_with=0))
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 9), np.int32)
COUNT = np.array([9, 5], np.int32)
REAL = np.arange(9) < COUNT[:, None]


@pytest.fixture(scope="module")
def model(build):
    return build(LAYERS)


@pytest.fixture(scope="module")
def scales(model) -> Scales:
    return calibrate(model, [(TOKENS, COUNT)], codec="fp8_e4m3_head", percentile=90)


def relative(got, want) -> float:
    return np.linalg.norm((got - want)[REAL]) / np.linalg.norm(want[REAL])


def eight_bits(x, scale):
    """x (B, T, heads, H), clipped and rounded by numpy."""
    codes = np.clip(x / scale[:, None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float32) * scale[:, None]


def attention(q, k, v):
    """Causal, (B, T, N, HV) in float64."""
    q, k, v = (np.float64(x) for x in (q, np.repeat(k, 2, axis=2), np.repeat(v, 2, axis=2)))
    scores = np.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    scores = np.where(np.tri(9, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


def test_errors_of_layers_are_those_of_numpy(model, scales, written):
    """A percentile leaves some numbers to be clipped, which these must show, too.

    A layer that reads the keys of another has no row.
    """
    report = codec_error(model, TOKENS, "fp8_e4m3_head", scales=scales, count=COUNT)
    assert (report.codec, report.tokens) == ("fp8_e4m3_head", 14)
    assert [layer.layer for layer in report.layers] == [0, 1]
    for error, (q, k, v), scale in zip(
        report.layers, written(model, TOKENS, COUNT), scales.layers[:2], strict=True
    ):
        q8, k8, v8 = (
            eight_bits(x, s)
            for x, s in ((q, scale.q_scale), (k, scale.k_scale), (v, scale.v_scale))
        )
        want = attention(q, k, v)
        assert np.isclose(error.key, relative(k8, k), rtol=1e-3)
        assert np.isclose(error.value, relative(v8, v), rtol=1e-3)
        assert np.isclose(error.query, relative(q8, q), rtol=1e-3)
        assert np.isclose(error.output, relative(attention(q, k8, v8), want), rtol=1e-3)
        with_q8 = relative(attention(q8, k8, v8), want)
        assert np.isclose(error.output_8bit_query, with_q8, rtol=1e-3)
        assert error.output_8bit_query != error.output


def test_divergence_is_that_of_decoding_token_by_token(model, scales):
    followed = np.arange(1, 9) < COUNT[:, None]  # tokens that the text goes on after

    def log_probabilities(codec, scales=None):
        cache = model.init_cache(2, 9, "dense", codec, scales=scales)
        steps = []
        for tokens in TOKENS.T:
            logits, cache = decode(model, tokens[:, None], cache, np.ones(2, np.int32))
            steps.append(np.float64(logits[:, 0]))
        logits = np.stack(steps[:-1], axis=1)[followed]
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    p, q = log_probabilities("f32"), log_probabilities("fp8_e4m3_head", scales)
    report = codec_error(model, TOKENS, "fp8_e4m3_head", scales=scales, count=COUNT)
    assert np.isclose(report.kl, (np.exp(p) * (p - q)).sum(-1).mean(), rtol=1e-2)
    said = np.arange(12), TOKENS[:, 1:][followed]
    assert np.isclose(report.loss, -q[said].mean(), rtol=1e-5)
    assert np.isclose(report.f32_loss, -p[said].mean(), rtol=1e-5)


@pytest.mark.parametrize("factor", [2000.0, 1e-3])
def test_calibration_mends_keys_that_scale_1_cannot_hold(build, factor):
    """Beyond 448, or among the subnormal numbers; within the range, fp8 errs by 2 to 3 %."""
    model = build(LAYERS, k=factor, q=1 / factor)
    scales = calibrate(model, [(TOKENS, COUNT)], codec="fp8_e4m3_head")
    largest = [float(layer.k_scale.max()) * 448 for layer in scales.layers[:2]]
    assert min(largest) > 448 if factor > 1 else max(largest) < 0.02
    before = codec_error(model, TOKENS, "fp8_e4m3_head", count=COUNT)
    after = codec_error(model, TOKENS, "fp8_e4m3_head", scales=scales, count=COUNT)
    for old, new in zip(before.layers, after.layers, strict=True):
        assert old.key > 0.2 > 0.04 > new.key
        assert old.output > new.output
    assert before.kl > after.kl


def test_f32_has_no_error_and_padding_counts_for_nothing(model):
    report = codec_error(model, np.where(REAL, TOKENS, 10**6), "f32", count=COUNT)
    assert report == codec_error(model, TOKENS, "f32", count=COUNT)
    assert report.kl == 0
    assert {x for layer in report.layers for x in (layer.key, layer.value, layer.output)} == {0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "codec"),
    [
        ("auto", "int8"),
        (Paged(2), ["bf16", "int4"]),
        (SinkRing(1, 2, reindexed=True), "fp8_e4m3"),
        ("dense", Kivi(4, 4, 4)),
    ],
    ids=str,
)
def test_every_layout_and_codec_can_be_measured(build, layout, codec):
    """Of what a layout keeps."""
    layers = (PLAIN, replace(PLAIN, window=3), replace(PLAIN, shares_with=0))
    report = codec_error(build(layers), TOKENS, codec, layout=layout, count=COUNT)
    assert [layer.layer for layer in report.layers] == [0, 1]
    for error in report.layers:
        assert 0 < error.key < 0.2
        assert 0 < error.output < 0.5
        assert error.query is error.output_8bit_query is None
    assert 0 < report.kl < 0.5


def test_it_is_data_and_a_table(model, scales):
    report = codec_error(model, TOKENS, "fp8_e4m3_head", scales=scales, count=COUNT)
    first = report.as_dict()["layers"][0]
    assert first["layer"] == 0
    name, *errors = next(report.rows())
    assert (name, errors[0]) == ("0", "fp8_e4m3_head")
    assert len(errors) == len(COLUMNS)
    assert errors[1] == f"{first['key']:.2%}"
