"""From scores to slots: what is protected stays, and the best of the others."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.evict import Adaptive, Evenly, Protected, Seen, choose

SLOTS, BUDGET = 20, 8
# Positions in no order, with gaps and dead slots; row 1 holds fewer than the budget.
RNG = np.random.default_rng(0)
POS = np.stack([RNG.permutation(SLOTS), np.full(SLOTS, -1)])
POS[0, [3, 11]] = -1
POS[1, :6] = [4, 0, 2, 6, 1, 3]
N = np.array([SLOTS, 7])


class Held(NamedTuple):
    """As much of a cache as selection asks for."""

    n: jax.Array


NOTHING, EVENLY = Protected(), Evenly()


def chosen(scores, protected=NOTHING, heads=EVENLY, pos=POS[:, None]):
    """For each row and head, the positions kept."""
    seen = Seen(Held(jnp.asarray(N)), jnp.asarray(pos), None, None, {})
    slots = np.asarray(choose(seen, jnp.asarray(scores, jnp.float32), BUDGET, protected, heads))
    pos = np.broadcast_to(pos, (*slots.shape[:2], SLOTS))
    kept = {}
    for at in np.ndindex(slots.shape[:2]):
        named = slots[at][slots[at] >= 0]
        assert len(set(named)) == len(named)
        kept[at] = set(pos[at][named])
        assert -1 not in kept[at]
    return kept


def scores(heads=2, seed=1):
    return np.random.default_rng(seed).normal(size=(2, heads, SLOTS))


def best(row_scores, row_pos, many):
    live = np.flatnonzero(row_pos >= 0)
    return set(row_pos[live[np.argsort(-row_scores[live], kind="stable")][:many]])


@pytest.mark.parametrize("heads", [1, 2])
def test_the_best_of_each_head(heads):
    given = scores(heads)
    for (row, head), kept in chosen(given).items():
        assert kept == best(given[row, head], POS[row], BUDGET)


def test_a_short_row_keeps_all():
    for head in (0, 1):
        assert chosen(scores())[1, head] == {0, 1, 2, 3, 4, 6}


@pytest.mark.parametrize("heads", [Evenly(), Adaptive(0.2), Adaptive(0)], ids=str)
@pytest.mark.parametrize(
    "protected", [Protected(2, 3), Protected(0, 1, 0.5), Protected(3)], ids=str
)
def test_what_is_protected_stays(protected, heads):
    """Though it scores least of all."""
    given = np.where((POS < 4) | (POS > 14), -1e30, 0)[:, None] + scores()
    newest = protected.recent + int(protected.recent_share * BUDGET)
    for (row, _), kept in chosen(given, protected, heads).items():
        live = set(POS[row][POS[row] >= 0])
        wanted = {p for p in live if p < protected.sinks or p >= N[row] - newest}
        assert wanted <= kept


def test_infinite_scores_and_nan_are_neither_dead_nor_protected():
    given = scores()
    given[:, :, 5:] = -np.inf
    given[:, 1, :5] = np.nan
    given[:, 0, :2] = np.inf
    kept = chosen(given, Protected(sinks=1, recent=1))
    for head in (0, 1):
        assert len(kept[0, head]) == BUDGET
        assert {0, 19} & set(POS[0]) <= kept[0, head]
        assert kept[1, head] == {0, 1, 2, 3, 4, 6}


@pytest.mark.parametrize("floor", [0.0, 0.25, 0.5, 1.0])
def test_heads_compete_for_the_budget(floor):
    """Ada-KV: each head its floor, then the best of all heads together."""
    given = scores()
    given[:, 1] += 1
    kept = chosen(given, heads=Adaptive(floor))
    sure = int(floor * BUDGET)
    wanted = {head: best(given[0, head], POS[0], sure) for head in (0, 1)}
    rest = sorted(
        (
            (given[0, head, slot], head, POS[0, slot])
            for head in (0, 1)
            for slot in range(SLOTS)
            if POS[0, slot] >= 0 and POS[0, slot] not in wanted[head]
        ),
        reverse=True,
    )
    for _, head, position in rest[: 2 * (BUDGET - sure)]:
        wanted[head].add(position)
    for head in (0, 1):
        assert kept[0, head] == wanted[head]
        assert kept[1, head] == {0, 1, 2, 3, 4, 6}
    assert len(kept[0, 0]) + len(kept[0, 1]) == 2 * BUDGET
    assert (len(kept[0, 0]) == BUDGET) == (floor == 1.0)


def test_rows_are_independent():
    given = scores()
    other = np.stack([given[0], -given[1]])
    assert chosen(given)[0, 0] == chosen(other)[0, 0]


def test_heads_that_hold_different_tokens():
    """A cache evicted before, whose heads have positions of their own."""
    pos = np.stack([POS, np.roll(POS, 5, axis=1)], axis=1)
    given = scores()
    for (row, head), kept in chosen(given, pos=pos).items():
        assert kept == best(given[row, head], pos[row, head], BUDGET)
    for (row, head), kept in chosen(given[:, :1], pos=pos).items():
        assert kept == best(given[row, 0], pos[row, head], BUDGET)
