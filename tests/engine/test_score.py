"""Scoring through caches: against a plain forward pass, and against the definition of KL."""

from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax import models
from kvjax.cache import CapacityError
from kvjax.engine import score
from kvjax.engine.score import divergence

GOLDEN = Path(__file__).parents[1] / "golden" / "llama_gqa_tied"
TOKENS = np.random.default_rng(0).integers(0, 96, (3, 20), np.int32)
COUNT = np.array([20, 13, 1], np.int32)


@cache
def model():
    return models.load(GOLDEN, dtype="f32")


def empty(codec="f32", capacity=24, layout="auto"):
    return model().init_cache(3, capacity, layout, codec)


@cache
def plain() -> np.ndarray:
    """Log-probabilities (B, T, V) of a forward pass without a cache."""
    return log_softmax(jax.jit(lambda model: model(TOKENS)[0])(model()))


def log_softmax(logits) -> np.ndarray:
    """In f64."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def test_the_likelihood_is_that_of_a_plain_forward_pass():
    scores, after = score(model(), TOKENS, empty(), chunk=7)
    want = -np.take_along_axis(plain()[:, :-1], TOKENS[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(scores.nll, want, atol=2e-5)
    np.testing.assert_array_equal(scores.likeliest, plain()[:, :-1].argmax(-1))
    assert scores.tokens == want.size
    assert scores.loss == pytest.approx(want.mean(), abs=1e-5)
    assert scores.perplexity == pytest.approx(np.exp(want.mean()), rel=1e-5)
    assert after.n.tolist() == [19] * 3


def test_chunks_change_nothing():
    """Of a lossless cache: token by token, and in chunks that do not divide the text."""
    reference, _ = score(model(), TOKENS, empty(), chunk=7)
    scores, _ = score(model(), TOKENS, empty(), chunk=1, reference=reference)
    np.testing.assert_allclose(scores.nll, reference.nll, atol=2e-5)
    assert scores.kl.max() < 1e-9


def test_rows_of_different_lengths():
    whole, _ = score(model(), TOKENS, empty(), chunk=7)
    ragged, after = score(model(), TOKENS, empty(), count=COUNT, chunk=7)
    assert ragged.predicted.tolist() == [19, 12, 0]
    assert after.n.tolist() == [19, 12, 0]
    real = np.arange(19) < ragged.predicted[:, None]
    np.testing.assert_allclose(ragged.nll, np.where(real, whole.nll, 0), atol=2e-5)
    np.testing.assert_array_equal(ragged.likeliest, np.where(real, whole.likeliest, -1))
    assert ragged.loss == pytest.approx(whole.nll[real].mean(), abs=1e-5)


def test_calls_join_at_a_shared_token():
    """Prefilled, then decoded: the scores of one call over all of it."""
    whole, _ = score(model(), TOKENS, empty(), chunk=7)
    first, cache = score(model(), TOKENS[:, :12], empty(), chunk=7)
    second, _ = score(model(), TOKENS[:, 11:], cache, chunk=1)
    joined = np.concatenate([first.nll, second.nll], axis=1)
    np.testing.assert_allclose(joined, whole.nll, atol=2e-5)


def test_a_cache_does_not_diverge_from_itself():
    """And a lossy one by what the definition says, in f64 and in the order (reference, tested)."""
    exact, _ = score(model(), TOKENS, empty(), chunk=1)
    again, _ = score(model(), TOKENS, empty(), chunk=1, reference=exact)
    assert (again.kl == 0).all()
    assert again.divergence == 0
    lossy, _ = score(model(), TOKENS, empty("int4"), count=COUNT, chunk=1)
    with pytest.raises(ValueError, match="reference: got scores of \\[19, 19, 19\\] tokens"):
        score(model(), TOKENS, empty("int4"), count=COUNT, chunk=1, reference=exact)
    exact, _ = score(model(), TOKENS, empty(), count=COUNT, chunk=1)
    lossy, _ = score(model(), TOKENS, empty("int4"), count=COUNT, chunk=1, reference=exact)
    log_p, log_q = (log_softmax(model().unembed(scores.states)) for scores in (exact, lossy))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    real = np.arange(19) < lossy.predicted[:, None]
    np.testing.assert_allclose(lossy.kl[real], kl[real], rtol=1e-3, atol=1e-6)
    assert (lossy.kl[~real] == 0).all()
    assert lossy.divergence == pytest.approx(kl[real].mean(), rel=1e-3)
    assert lossy.divergence > 1e-5


def test_divergences_small_and_large():
    """Relative to an f64 sum: where rounding would drown it, and where p or q vanishes."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(1, 1000)).astype(np.float32) * 5
    for size in (1e-3, 0.1, 3.0, 100.0):
        other = logits + size * rng.normal(size=logits.shape).astype(np.float32)
        p, q = log_softmax(logits), log_softmax(other)
        want = (np.exp(p) * (p - q)).sum()
        got = divergence(jax.nn.log_softmax(logits), jax.nn.log_softmax(other))
        assert float(got[0]) == pytest.approx(want, rel=2e-3), size


def test_the_step_keeps_no_logits():
    """The compiled reading step takes the cache over and returns states alone."""
    from kvjax.engine.score import _read

    count = np.full(3, 8, np.int32)
    memory = _read.lower(model(), TOKENS[:, :8], empty(), count).compile().memory_analysis()
    nbytes = empty().nbytes
    assert memory.alias_size_in_bytes == nbytes
    states = 3 * 8 * model().config.d_model * 4
    assert memory.output_size_in_bytes - nbytes <= states + 1024


def test_a_cache_that_is_too_small_raises():
    with pytest.raises(CapacityError, match=r"rows \[0, 1, 2\] ran over the capacity of 24"):
        score(model(), np.tile(TOKENS, 2), empty(), chunk=7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": TOKENS[:2]}, r"tokens: got int32\[2, 20\]; accepted: integers \(3, T\)"),
        ({"tokens": TOKENS[:, :1]}, r"tokens: got int32\[3, 1\]"),
        ({"tokens": TOKENS + 90}, "tokens: got ids 90 to 185; accepted: 0 to 95"),
        ({"count": COUNT + 1}, r"count: got \[21, 14, 2\]; accepted: 3 numbers from 0 to 20"),
        ({"count": np.minimum(COUNT, 1)}, r"count: got \[1, 1, 1\]; accepted: a row of 2"),
        ({"chunk": 0}, "chunk: got 0; accepted: 1 and more"),
    ],
)
def test_what_cannot_be_scored_is_refused(change, message):
    given = {"tokens": TOKENS, "count": None, "chunk": 4} | change
    tokens = given.pop("tokens")
    with pytest.raises(ValueError, match=message):
        score(model(), tokens, empty(), **given)
