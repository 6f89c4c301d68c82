"""Samplers against the distribution that numpy derives from the definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.engine import Sampler

DRAWS = 20_000
# Probabilities 0.4, 0.3, 0.15, 0.1, 0.05 in some order.
LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15], np.float32)) + 3


def shares(sampler: Sampler, logits: np.ndarray = LOGITS) -> np.ndarray:
    rows = jnp.broadcast_to(logits, (DRAWS, len(logits)))
    tokens = jax.jit(sampler)(rows, jax.random.key(0))
    assert tokens.dtype == jnp.int32
    return np.bincount(tokens, minlength=len(logits)) / DRAWS


def derived(temperature: float, top_k: int | None, top_p: float | None) -> np.ndarray:
    probs = np.exp(LOGITS.astype(np.float64) / temperature)
    probs /= probs.sum()
    order = np.argsort(-probs)[:top_k]
    if top_p is not None:
        reached = np.cumsum(probs[order] / probs[order].sum())
        order = order[: np.argmax(reached >= top_p - 1e-9) + 1]
    kept = np.zeros_like(probs)
    kept[order] = probs[order]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, None, None),
        (0.5, None, None),
        (2.0, None, None),
        (1.0, 1, None),
        (1.0, 3, None),
        (1.0, 99, None),
        (1.0, None, 0.3),
        (1.0, None, 0.6),
        (1.0, None, 0.9),
        (1.0, None, 1.0),
        (2.0, None, 0.6),
        # Of the three likeliest, 0.47 and 0.35 reach 0.75; of all, 0.4, 0.3 and 0.15 would.
        (1.0, 3, 0.75),
    ],
)
def test_shares_are_those_of_the_definition(temperature, top_k, top_p):
    expected = derived(temperature, top_k, top_p)
    found = shares(Sampler(temperature, top_k, top_p))
    assert not found[expected == 0].any()
    # Five standard deviations of a share.
    assert (np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / DRAWS)).all()


def test_zero_temperature_takes_the_likeliest():
    rows = np.random.default_rng(0).normal(size=(64, 50)).astype(np.float32)
    tokens = Sampler()(jnp.asarray(rows), jax.random.key(0))
    np.testing.assert_array_equal(tokens, rows.argmax(-1))
    assert tokens.dtype == jnp.int32


def test_rows_are_drawn_apart():
    """Every row has its own distribution and its own random numbers."""
    rows = np.full((4, 5), -np.inf, np.float32)
    rows[np.arange(4), [3, 0, 4, 1]] = 0
    assert Sampler(1.0, 2, 0.5)(jnp.asarray(rows), jax.random.key(0)).tolist() == [3, 0, 4, 1]
    flat = Sampler(1.0)(jnp.zeros((32, 1000)), jax.random.key(0))
    assert len(set(flat.tolist())) > 25


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: at least 0"),
        ({"top_k": 0}, "top_k=0: at least 1"),
        ({"top_p": 0.0}, "top_p=0.0: more than 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5: more than 0 and at most 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampler(**settings)
