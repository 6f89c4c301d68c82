"""Maps of who reads whose keys and values, and what is refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kvjax.nn import (
    Attention,
    AttentionConfig,
    DecoderConfig,
    MlpConfig,
    Rope,
    Shared,
    cla,
    last_layers,
    share,
    yoco,
)

PLAIN = AttentionConfig(d_model=8, query_heads=4, kv_heads=2, key_dim=4, value_dim=4, rope=Rope(4))
X, POSITIONS = jnp.ones((1, 3, 8)), jnp.arange(3)[None]


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (cla(6, 2), (0, 0, 2, 2, 4, 4)),
        (cla(5, 2), (0, 0, 2, 2, 4)),
        (cla(8, 3), (0, 0, 0, 3, 3, 3, 6, 6)),
        (cla(3, 1), (0, 1, 2)),
        (cla(2, 9), (0, 0)),
        (yoco(8), (0, 1, 2, 3, 4, 4, 4, 4)),
        (yoco(5), (0, 1, 2, 2, 2)),
        (yoco(1), (0,)),
        (last_layers("ssfssf", 2), (0, 1, 2, 3, 3, 2)),
        (last_layers("ssfssf", 0), (0, 1, 2, 3, 4, 5)),
        # Ten layers of which four share: the donor is the last of its kind that does not.
        (last_layers("ssssfssssf", 4), (0, 1, 2, 3, 4, 5, 5, 5, 5, 4)),
    ],
)
def test_maps(got, want):
    assert got == want


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cla(0, 2), "layers: got 0; accepted: 1 and more"),
        (lambda: cla(4, 0), "factor: got 0; accepted: 1 and more"),
        (lambda: yoco(0), "layers: got 0; accepted: 1 and more"),
        (lambda: last_layers("ab", 2), "shared: got 2; accepted: 0 to 1"),
        (lambda: last_layers("aab", 1), "got 1, with which layer 2 finds none of its kind .'b'."),
        (lambda: share((PLAIN,) * 3, (0, 1)), "producers: got 2; accepted: 3, one for each layer"),
        (
            lambda: share((PLAIN,) * 2, (1, 1)),
            r"attention\[0\].shares_with: got 1; accepted: the index of an earlier .*2405.10637",
        ),
        (lambda: share((PLAIN,) * 2, (0, -1)), "got -1; accepted: the index of an earlier layer"),
        (lambda: share((PLAIN,) * 3, (0, 0, 1)), "got 1, which shares itself; .*such as 0"),
        (
            lambda: share((PLAIN, replace(PLAIN, kv_heads=1)), (0, 0)),
            r"attention\[1\].kv_heads: got 1; accepted: 2, as in layer 0, whose keys",
        ),
        (
            lambda: share((PLAIN, replace(PLAIN, rope=None)), (0, 0)),
            r"attention\[1\].rope: got None; accepted: Rope",
        ),
    ],
)
def test_maps_that_cannot_be_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_decoder_checks_its_layers():
    layers = (PLAIN, replace(PLAIN, shares_with=0, value_dim=2))
    with pytest.raises(ValueError, match=r"attention\[1\].value_dim: got 2; accepted: 4"):
        DecoderConfig(11, 8, attention=layers, mlp=MlpConfig(4))


def test_readers_may_differ_where_keys_do_not():
    several = replace(PLAIN, query_heads=8, window=3, qk_norm="head", soft_cap=2.0, sinks=True)
    config = DecoderConfig(11, 8, share((PLAIN, several, PLAIN), (0, 0, 2)), mlp=MlpConfig(4))
    assert config.producers == (0, 0, 2)
    assert config.cached == (0, 2)


def test_a_shared_layer_makes_and_writes_nothing():
    own, shared = (
        nnx.eval_shape(lambda c=config: Attention(c, dtype=jnp.float32, rngs=nnx.Rngs(0)))
        for config in share((PLAIN, PLAIN), (0, 0))
    )

    def run(module, cache):
        return jax.eval_shape(lambda m, *args: m(*args), module, X, POSITIONS, cache)

    for cache in (None, Shared(None)):
        with pytest.raises(ValueError, match=r"cache: got one to write to; .* shares with layer 0"):
            run(shared, cache)
    with pytest.raises(ValueError, match="keys and values of layer 0 and makes none"):
        shared.project(X, POSITIONS)
    y, made = run(own, Shared(None))
    with pytest.raises(ValueError, match="cache: got the keys and values of another layer"):
        run(own, made)
    z, same = run(shared, made)
    assert jax.tree.leaves(same) == jax.tree.leaves(made)
    assert y.shape == z.shape == X.shape
