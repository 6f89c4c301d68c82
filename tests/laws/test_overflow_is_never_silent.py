"""Law 6: what does not fit raises outside jit; inside, it is dropped and flagged."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import CapacityError


@pytest.mark.parametrize("count", [(1, 1), (6, 5)], ids=str)
def test_overflow(member, count):
    """Row 0 has room for one token less than it is to take, row 1 for more than enough."""
    held = (13 + 1 - count[0], 2)
    before = member.fill(*held)
    with pytest.raises(CapacityError, match=rf"capacity is 13 .*hold \[{held[0]}, 2\]"):
        before.append(member.blank(max(count)), jnp.array(count))
    before.check()
    _, after = member.step(held, count, before)
    with pytest.raises(CapacityError, match=r"rows \[0\] ran over the capacity of 13"):
        after.check()
    assert after.n.tolist() == [held[0], 2 + count[1]]
    for name, leaf in after.leaves.items():
        np.testing.assert_array_equal(leaf[0], before.leaves[name][0])
        kept = np.r_[0:2, 2 + count[1] : 13]
        np.testing.assert_array_equal(leaf[1][:, kept], before.leaves[name][1][:, kept])


def test_a_flag_stays(member):
    _, after = member.step((13, 2), (1, 1), member.fill(13, 2))
    _, later = member.step((13, 3), (0, 1), after)
    assert later.overflow.tolist() == [True, False]
