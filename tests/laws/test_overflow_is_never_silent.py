"""Law 6: what does not fit raises outside jit; inside, it is dropped and flagged."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import CapacityError


@pytest.mark.parametrize("count", [(1, 1), (6, 5)], ids=str)
def test_overflow(member, count):
    """Row 0 has room for one token less than it is to take, row 1 for more than enough."""
    if member.cache_case.endless:
        pytest.skip("a layout that replaces old tokens is never full")
    most = member.init().capacity
    held = (most + 1 - count[0], 2)
    before = member.fill(*held)
    with pytest.raises(CapacityError, match=rf"hold \[{held[0]}, 2\] .*{most}|{most}.*hold"):
        before.append(member.blank(max(count)), jnp.array(count))
    before.check()
    _, after = member.step(held, count, before)
    with pytest.raises(CapacityError, match=rf"rows \[0\] .*{most}"):
        after.check()
    assert after.n.tolist() == [held[0], 2 + count[1]]
    for row, n in enumerate(held):
        for old, new in zip(records(before, row, n), records(after, row, n), strict=True):
            np.testing.assert_array_equal(old, new)
    assert not any(np.isnan(x).any() for x in records(after, 1, 2 + count[1]))


def records(cache, row: int, tokens: int) -> list[np.ndarray]:
    """Keys and values of a row's first tokens, as attention reads them."""
    found: dict[int, tuple] = {}
    for i in range(int(cache.blocks())):
        block = cache.block(jnp.int32(i))
        for slot, position in enumerate(np.asarray(block.pos[row, 0])):
            if position >= 0:
                found[int(position)] = (block.k[row, :, slot], block.v[row, :, slot])
    return [np.stack([found[p][part] for p in range(tokens)]) for part in (0, 1)]


def test_a_flag_stays(member):
    if member.cache_case.endless:
        pytest.skip("a layout that replaces old tokens is never full")
    most = member.init().capacity
    _, after = member.step((most, 2), (1, 1), member.fill(most, 2))
    _, later = member.step((most, 3), (0, 1), after)
    assert later.overflow.tolist() == [True, False]
