"""Law 6: what does not fit raises outside jit; inside, it is dropped and flagged."""

import pytest

from laws import checks


@pytest.mark.parametrize("count", [(1, 1), (6, 5)], ids=str)
def test_overflow(member, count):
    if member.cache_case.endless:
        pytest.skip("a layout that replaces old tokens is never full")
    checks.assert_overflow_is_not_silent(member, count)


def test_a_flag_stays(member):
    if member.cache_case.endless:
        pytest.skip("a layout that replaces old tokens is never full")
    most = member.init().capacity
    _, after = member.step((most, 2), (1, 1), member.fill(most, 2))
    _, later = member.step((most, 3), (0, 1), after)
    assert later.overflow.tolist() == [True, False]
