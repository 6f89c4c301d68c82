"""The jitted steps: what they return, and that they take the cache over."""

from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax import models
from kvjax.cache import CapacityError
from kvjax.engine import decode, prefill

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 4), np.int32)
FULL, ONE, NONE = (np.full(2, n, np.int32) for n in (4, 1, 0))


@cache
def model():
    return models.load(GOLDEN / "llama_bias")


def filled(capacity: int = 12):
    return prefill(model(), TOKENS, model().init_cache(2, capacity, codec="f32"), FULL)[1]


def test_prefill_gives_the_last_logits_that_decode_gives():
    logits, _ = prefill(model(), TOKENS, model().init_cache(2, 12, codec="f32"), FULL)
    every, _ = decode(model(), TOKENS, model().init_cache(2, 12, codec="f32"), FULL)
    np.testing.assert_allclose(logits, every[:, -1], atol=1e-5)


@pytest.mark.parametrize("step", [prefill, decode])
def test_the_old_cache_is_dead(step):
    before = filled()
    step(model(), TOKENS, before, FULL)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(before.layers[0].leaves["k"])


@pytest.mark.parametrize("width", [1, 4])
def test_without_donation_the_results_are_equal(width):
    """Keeping the old cache changes nothing: the step reads nothing that it has overwritten."""
    kept = jax.jit(lambda model, tokens, cache, count: model(tokens, cache, count=count))
    tokens, count, before = TOKENS[:, :width], np.full(2, width, np.int32), filled()
    for _ in range(2):
        logits, after = kept(model(), tokens, before, count)
    assert before.n.tolist() == [4, 4]
    donated = decode(model(), tokens, before, count)
    for left, right in zip(jax.tree.leaves((logits, after)), jax.tree.leaves(donated), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_row_with_count_0_rests():
    _, cache = decode(model(), TOKENS[:, :1], filled(), np.array([1, 0], np.int32))
    assert cache.n.tolist() == [5, 4]
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(filled())]
    _, cache = decode(model(), TOKENS[:, :1], filled(), NONE)
    for left, right in zip(jax.tree.leaves(cache), before, strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_full_row_is_flagged_and_the_other_goes_on():
    cache = filled(capacity=5)
    _, cache = decode(model(), TOKENS[:, :1], cache, np.array([1, 0], np.int32))
    cache.check()
    held = np.asarray(cache.layers[0].leaves["k"][0])
    alone, _ = decode(model(), TOKENS[:, :1], filled(), ONE)
    logits, cache = decode(model(), TOKENS[:, :1], cache, ONE)
    with pytest.raises(CapacityError, match=r"rows \[0\] ran over the capacity of 5"):
        cache.check()
    assert cache.n.tolist() == [5, 5]
    np.testing.assert_array_equal(cache.layers[0].leaves["k"][0], held)
    np.testing.assert_allclose(logits[1], alone[1], atol=1e-5)


def test_outside_jit_a_full_row_raises():
    with pytest.raises(CapacityError, match=r"capacity is 5 tokens a row; rows hold \[4, 4\]"):
        model()(TOKENS, filled(capacity=5))


def test_beams_and_rollback():
    """Two beams of row 1 go on as row 1 does; taking tokens back is as if they had not come."""
    cache = decode(model(), TOKENS, filled(), FULL)[1].rollback(4).select(np.array([1, 1]))
    beams, _ = decode(model(), TOKENS[:, :1], cache, ONE)
    rows, _ = decode(model(), TOKENS[:, :1], filled(), ONE)
    np.testing.assert_allclose(beams[1], rows[1], atol=1e-5)
    assert np.abs(beams[0] - rows[0]).max() > 1e-3
