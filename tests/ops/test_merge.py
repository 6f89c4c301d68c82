"""Merging: attention over any split of the keys is attention over all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.ops import decode_attention, merge
from kvjax.ops.merge import merge_splits

KEYS = 12


def attention(scores, values):
    """One query, in float64 numpy: out (HV,), lse ()."""
    if not len(scores):
        return np.full(values.shape[1], np.nan), -np.inf
    weights = np.exp(scores - scores.max())
    lse = scores.max() + np.log(weights.sum())
    return (np.exp(scores - lse)[:, None] * values).sum(0), lse


@settings(max_examples=60, deadline=None)
@given(
    # The part to which each key belongs; parts that get none are empty.
    parts=st.lists(st.integers(0, 3), min_size=KEYS, max_size=KEYS),
    spread=st.sampled_from([0.1, 10.0, 700.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_split_is_exact(parts, spread, seed):
    rng = np.random.default_rng(seed)
    scores, values = rng.normal(0, spread, KEYS), rng.normal(size=(KEYS, 3))
    pieces = [
        attention(scores[chosen], values[chosen])
        for part in range(4)
        for chosen in [np.array(parts) == part]
    ]
    with jax.enable_x64(True):
        outs, lses = (jnp.array(x) for x in zip(*pieces, strict=True))
        out, lse = merge(outs, lses)
    want_out, want_lse = attention(scores, values)
    np.testing.assert_allclose(out, want_out, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-13, atol=1e-13)


def test_an_unweighted_mean_would_show():
    """The comparison above can fail."""
    outs, lses = jnp.array([[1.0], [3.0]]), jnp.array([0.0, 1.0])
    out, _ = merge(outs, lses)
    assert abs(out.item() - outs.mean()) > 0.1


def test_nothing_but_empty_parts_is_empty():
    out, lse = merge([jnp.full((2, 3), jnp.nan)] * 2, [jnp.full((2,), -jnp.inf)] * 2)
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("lengths", [[0, 1], [5, 6], [10, 15], [20, 20]], ids=str)
def test_split_decoding(lengths, draw, assert_same):
    """Four splits of five slots; lengths at and beside their borders, so that some are empty."""
    q, k, v = draw(2, (4, 2), 20, (8, 8))
    lengths = jnp.array(lengths)
    parts = [
        decode_attention(
            q,
            k[:, :, start : start + 5],
            v[:, :, start : start + 5],
            jnp.clip(lengths - start, 0, 5),
            return_lse=True,
        )
        for start in range(0, 20, 5)
    ]
    whole = decode_attention(q, k, v, lengths, return_lse=True)
    assert_same(merge(*zip(*parts, strict=True)), whole)


def test_dtypes_are_kept():
    out, lse = merge(jnp.ones((2, 3), jnp.bfloat16), jnp.zeros((2,), jnp.float32))
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32


@pytest.mark.parametrize(
    ("outs", "lses"),
    [
        ([], []),
        ([(2, 3)], [(2,), (2,)]),
        ([(2, 3), (2, 4)], [(2,), (2,)]),
        ([(2, 3)], [(2, 3)]),
        ([(2, 3), (2, 3)], [(2,), (1,)]),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(outs, lses):
    with pytest.raises(ValueError, match="accepted are one or more outs of one shape"):
        merge([jnp.zeros(s) for s in outs], [jnp.zeros(s) for s in lses])


def test_splits_in_one_reduction_are_the_same():
    """Parts without keys among them, which hold NaN, and a row that has none at all."""
    rng = np.random.default_rng(0)
    outs, lses = rng.normal(size=(5, 3, 2, 4)), rng.normal(scale=40, size=(5, 3, 2))
    lses[1], lses[:, 2], lses[0, 0, 1] = -np.inf, -np.inf, -np.inf
    outs[np.isneginf(lses)] = np.nan
    parts = jnp.asarray(outs, jnp.float32), jnp.asarray(lses, jnp.float32)
    for got, want in zip(merge_splits(*parts), merge(*parts), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    assert np.isneginf(merge_splits(*parts)[1][2]).all()
