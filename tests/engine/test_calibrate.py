"""Calibration: what the model really writes, token by token, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest

from kvjax.engine import calibrate, random_tokens
from kvjax.engine.calibrate import rows
from kvjax.nn import AttentionConfig, Decoder, Rope

PLAIN = AttentionConfig(
    32, query_heads=4, kv_heads=2, key_dim=8, value_dim=4, rope=Rope(8, theta=100.0)
)
LAYERS = (PLAIN, replace(PLAIN, qk_norm="head", window=3), replace(PLAIN, shares_with=0))
VOCAB, LARGEST = 50, {"fp8_e4m3": 448, "fp8_e4m3_head": 448, "fp8_e5m2": 57344}
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 9), np.int32)
COUNT = np.array([9, 5], np.int32)
REAL = np.arange(9) < COUNT[:, None]


@pytest.fixture(scope="module")
def model(build) -> Decoder:
    return build(LAYERS)


@pytest.fixture(scope="module")
def arrays(model, written) -> list[tuple[np.ndarray, ...]]:
    return written(model, TOKENS, COUNT)


def as_numbers(scales) -> list[dict[str, np.ndarray]]:
    return [vars(layer) for layer in scales.layers if layer is not None]


@pytest.mark.parametrize("codec", LARGEST)
@pytest.mark.parametrize("percentile", [None, 80.0])
def test_scales_are_those_of_what_is_written(model, arrays, codec, percentile):
    scales = calibrate(model, [(TOKENS, COUNT)], codec=codec, percentile=percentile)
    assert (scales.codec, scales.tokens, scales.percentile) == (codec, 14, percentile)
    assert scales.layers[2] is None
    for layer, of_layer in zip(as_numbers(scales), arrays, strict=True):
        for name, array in zip(("q_scale", "k_scale", "v_scale"), of_layer, strict=True):
            tokens = np.abs(array).max(-1)[REAL]
            if name != "q_scale" and codec != "fp8_e4m3_head":
                tokens = tokens.max(1)
            want = tokens.max(0) if percentile is None else np.percentile(tokens, 80.0, axis=0)
            assert layer[name].shape == want.shape
            np.testing.assert_allclose(layer[name], want / LARGEST[codec], rtol=1e-4)
            # As many numbers as there are, so that no two heads could be swapped unseen.
            assert len(np.unique(layer[name])) == layer[name].size


@pytest.mark.parametrize("percentile", [None, 80.0])
def test_padding_counts_for_nothing(model, percentile):
    """Whatever lies there, ids outside the vocabulary included, and rows without a token."""

    def of(*batches):
        return as_numbers(calibrate(model, batches, codec="fp8_e4m3_head", percentile=percentile))

    want = of(TOKENS[:1], TOKENS[1:, :5])
    for garbage in (7, 10**6, -1):
        padded = np.where(REAL, TOKENS, garbage)
        padded = np.concatenate([padded, np.full((1, 9), garbage)])
        for layer, same in zip(of((padded, np.array([9, 5, 0]))), want, strict=True):
            for name, scale in layer.items():
                np.testing.assert_allclose(scale, same[name], rtol=1e-5)


def test_a_later_batch_raises_scales_and_never_lowers_them(model):
    batches = [TOKENS[:, :3], TOKENS[:, 3:6], TOKENS[:, 6:]]

    def of(*batches):
        return as_numbers(calibrate(model, batches, codec="fp8_e4m3_head"))

    alone, raised = [of(batch) for batch in batches], 0
    for many in (2, 3):
        for i, layer in enumerate(of(*batches[:many])):
            for name, scale in layer.items():
                each = [one[i][name] for one in alone[:many]]
                np.testing.assert_allclose(scale, np.max(each, axis=0), rtol=1e-6)
                raised += (scale > each[0] * 1.001).sum()
    assert raised


def test_a_percentile_is_of_all_batches_together(model):
    def of(*batches):
        return as_numbers(calibrate(model, batches, codec="fp8_e4m3", percentile=70))

    for layer, same in zip(of(TOKENS[:1], TOKENS[1:]), of(TOKENS), strict=True):
        for name, scale in layer.items():
            np.testing.assert_allclose(scale, same[name], rtol=1e-5)


def test_all_zero_is_at_scale_1(build):
    for layer in as_numbers(calibrate(build(LAYERS, v=0.0), [TOKENS], codec="fp8_e4m3")):
        assert layer["v_scale"] == 1 > layer["k_scale"]


def test_rows_of_a_stream():
    batches = list(rows(np.arange(11), length=3, batch=2))
    assert [count.tolist() for _, count in batches] == [[3, 3], [3, 2]]
    kept = [row[:n] for ids, count in batches for row, n in zip(ids, count, strict=True)]
    np.testing.assert_array_equal(np.concatenate(kept), np.arange(11))


def test_random_tokens_are_of_the_whole_vocabulary_and_repeat(model):
    (ids, count), (again, _) = (next(random_tokens(model, 900, 100, 9)) for _ in range(2))
    assert set(ids.flat) == set(range(VOCAB))
    assert count.sum() == 900
    np.testing.assert_array_equal(ids, again)


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([TOKENS], {"codec": "fp8_e4m3_token"}, "codec: got 'fp8_e4m3_token', which has no scales"),
        ([TOKENS], {"percentile": 101}, "percentile: got 101; accepted: 0 to 100, or None"),
        ([], {}, "batches: got no tokens; accepted: at least 1"),
        ([(TOKENS, np.array([0, 0]))], {}, "batches: got no tokens; accepted: at least 1"),
        ([TOKENS + 45], {}, "tokens: got ids 45 to 93; accepted: 0 to 49"),
        ([TOKENS[0]], {}, r"tokens: got int32\[9\]; accepted: integers \(B, T\)"),
        ([(TOKENS, [10, 1])], {}, r"count: got \[10, 1\]; accepted: 2 numbers from 0 to 9"),
    ],
)
def test_bad_input_is_refused(model, batches, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        calibrate(model, batches, **{"codec": "fp8_e4m3"} | options)


def test_numbers_that_are_not_finite_are_refused(build):
    with pytest.raises(ValueError, match=r"^layers\[0\].v_scale: got infinite or NaN numbers"):
        calibrate(build(LAYERS, v=np.inf), [TOKENS], codec="fp8_e4m3", percentile=50)
