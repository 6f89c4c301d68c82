"""Law 1: training forward, prefill and token-by-token decode are one function."""

from dataclasses import replace

import numpy as np
import pytest

from laws import checks
from laws.members import BATCH, CAPACITY, RECORDS, Member, X, build, forward


def test_any_split_gives_what_is_defined(member):
    checks.assert_one_function(member)


def test_nothing_is_encoded_twice(member):
    checks.assert_nothing_is_encoded_twice(member)


def test_what_is_read_back_is_within_the_bound_of_the_codec(member):
    checks.assert_records_are_within_the_bound(member)


@pytest.mark.parametrize("record", RECORDS)
def test_the_training_forward_gives_what_is_defined(record):
    config = RECORDS[record]
    positions = np.broadcast_to(np.arange(CAPACITY, dtype=np.int32), (BATCH, CAPACITY))
    y, _ = build(config)(X[:, :CAPACITY], positions)
    want = forward(config, "dense")
    np.testing.assert_allclose(y, want, atol=1e-5)


@pytest.mark.control
def test_a_forgotten_token_shows(member):
    """The comparison can fail: both rows lose the newest of five tokens."""
    cache = member.fill(5, 5)
    y, _ = member.step([5, 5], [1, 1], replace(cache, n=cache.n - 1))
    assert np.abs(y[:, 0] - member.forward()[:, 5]).max() > member.tolerance


@pytest.mark.control
def test_a_rounded_record_shows_at_the_tolerance_of_f32(member):
    """What the lossy codecs are allowed would be seen in the lossless one."""
    lossless = replace(member.cache_case, error=0.0)
    within = (
        checks.gap(member, checks.SPLITS["chunks"]) <= Member(member.attention, lossless).tolerance
    )
    assert within == (member.cache_case.error == 0)
