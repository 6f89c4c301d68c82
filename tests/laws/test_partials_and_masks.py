"""Law 5: what is dead takes no part, whatever it holds; an empty row gives 0 and LSE -inf."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.nn import TensorProductAttentionConfig
from kvjax.ops import attend
from laws import checks
from laws.members import seen_by_queries

HELD = (7, 0)


@pytest.mark.parametrize("count", [(1, 1), (6, 2)], ids=str)
def test_dead_slots_take_no_part(member, count):
    checks.assert_dead_slots_take_no_part(member, count)


@pytest.mark.control
@pytest.mark.parametrize("count", [(1, 1), (6, 2)], ids=str)
def test_poison_in_a_live_slot_shows(member, count):
    """The test above can fail: of the poisoned slots of row 0, one counts as live."""
    cache = checks.poisoned(member.fill(*HELD), np.nan)
    longer = replace(cache, n=cache.n + jnp.array([1, 0]))
    y, _ = member.step((HELD[0] + 1, 0), count, longer)
    clean, _ = member.step((HELD[0] + 1, 0), count, member.fill(HELD[0] + 1, 0))
    assert not np.array_equal(y[0, 0], clean[0, 0])
    np.testing.assert_array_equal(y[1, : count[1]], clean[1, : count[1]])


def test_an_empty_row_gives_0_and_minus_infinity(member):
    a, cache = member.attention, checks.poisoned(member.fill(*HELD), np.nan)
    width = jax.eval_shape(seen_by_queries(a, cache).block, 0).k.shape[-1]
    if isinstance(a, TensorProductAttentionConfig):  # beside a factor over heads
        width -= a.query_heads
    q = np.random.default_rng(0).normal(size=(2, 3, a.query_heads, width)).astype(np.float32)
    run = jax.jit(lambda q, cache, at: attend(q, seen_by_queries(a, cache), at))
    out, lse = run(q, cache, np.full((2, 3), 9, np.int32))
    assert lse.dtype == jnp.float32
    assert np.isfinite(out[0]).all()
    assert np.isfinite(lse[0]).all()
    assert not np.asarray(out[1]).any()
    assert np.isneginf(lse[1]).all()
