"""Law 1: training forward, prefill and token-by-token decode are one function."""

from dataclasses import replace
from itertools import cycle

import numpy as np

LENGTHS = np.array([13, 7])
SPLITS = {
    "chunks": [(6, 6)],
    "token by token": [(1, 1)],
    "uneven": [(2, 6), (1, 1), (5, 0), (1, 3)],
}


def gap(member, splits) -> float:
    """The largest difference from the full forward pass, rows taken in steps of `splits` tokens."""
    full, cache, done, splits = member.forward(), member.init(), LENGTHS * 0, cycle(splits)
    largest = 0.0
    while (done < LENGTHS).any():
        count = np.minimum(next(splits), LENGTHS - done)
        y, cache = member.step(done, count, cache)
        for row, (start, n) in enumerate(zip(done, count, strict=True)):
            difference = np.abs(y[row, :n] - full[row, start : start + n])
            largest = max(largest, difference.max(initial=0))
        done = done + count
    cache.check()
    assert cache.n.tolist() == LENGTHS.tolist()
    return largest


def test_any_split_gives_the_training_forward(member):
    for name, splits in SPLITS.items():
        assert gap(member, splits) <= member.tolerance, name


def test_a_forgotten_token_shows(member):
    """The comparison can fail: both rows lose the newest of five tokens."""
    cache = member.fill(5, 5)
    y, _ = member.step([5, 5], [1, 1], replace(cache, n=cache.n - 1))
    assert np.abs(y[:, 0] - member.forward()[:, 5]).max() > member.tolerance


def test_a_rounded_record_shows_at_the_tolerance_of_f32(member):
    """What the lossy codecs are allowed would be seen in the lossless one."""
    lossless = replace(member, cache_case=replace(member.cache_case, error=0.0))
    within = gap(member, SPLITS["chunks"]) <= lossless.tolerance
    assert within == (member.cache_case.error == 0)
