"""What holds for the layers of a cache together."""

import jax
import jax.numpy as jnp
import pytest

from kvjax.cache import Cache, CapacityError, Record, init_layer_cache


@pytest.fixture
def mixed():
    """A dense layer and a ring of 4, of rows with 6 and 3 tokens."""
    count, record = jnp.array([6, 3]), Record(*(jnp.ones((2, 1, 6, 4)) for _ in "kv"))
    layers = (
        init_layer_cache(2, 8, kv_heads=1, key_dim=4, value_dim=4, window=window).append(
            record, count
        )
        for window in (None, 4)
    )
    return Cache(tuple(layers))


def test_a_row_is_rolled_back_in_all_layers_or_in_none(mixed):
    rolled = jax.jit(lambda cache: cache.rollback(2))(mixed)
    assert [layer.n.tolist() for layer in rolled.layers] == [[6, 1], [6, 1]]
    with pytest.raises(CapacityError, match=r"rows \[0\]"):
        rolled.check()


def test_outside_jit_it_says_so(mixed):
    with pytest.raises(ValueError, match="rollback of"):
        mixed.rollback(2)
    rolled = mixed.rollback(jnp.array([0, 2]))
    rolled.check()
    assert [layer.n.tolist() for layer in rolled.layers] == [[6, 1], [6, 1]]
