"""Observation: queries of tokens that the cache holds, as the model itself has them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.cache import Cache
from kvjax.engine import prefill
from kvjax.evict import observe
from kvjax.nn import AttentionConfig, Decoder, DecoderConfig, MlpConfig, Rope, share
from kvjax.nn import attention as attention_module
from kvjax.ops import attend

ROPE = Rope(8, theta=100.0)
PLAIN = AttentionConfig(32, query_heads=4, kv_heads=2, key_dim=8, value_dim=8, rope=ROPE)
SHARING = share((PLAIN, replace(PLAIN, sinks=True), PLAIN, PLAIN), (0, 0, 2, 2))
LAYERS = (PLAIN, replace(PLAIN, sinks=True, soft_cap=2.0), replace(PLAIN, qk_norm="head"))
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 12), np.int32)
LENGTHS = np.array([12, 9], np.int32)


def decoder(layers=LAYERS) -> Decoder:
    config = DecoderConfig(50, 32, attention=layers, mlp=MlpConfig(48))
    model = Decoder(config, rngs=nnx.Rngs(0))
    leaves, treedef = jax.tree.flatten(model)
    rng = np.random.default_rng(1)
    drawn = [leaf + rng.normal(0, 0.2, leaf.shape).astype(np.float32) for leaf in leaves]
    return jax.tree.unflatten(treedef, drawn)


def filled(model, lengths=LENGTHS, capacity=16, **settings):
    cache = model.init_cache(2, capacity, codec="f32", **settings)
    return prefill(model, TOKENS, cache, np.asarray(lengths, np.int32))[1]


def newest(many, lengths=LENGTHS):
    """The last `many` of each row, (2, many)."""
    return np.take_along_axis(TOKENS, lengths[:, None] - many + np.arange(many), axis=1)


@jax.jit
def queries(model, cache, tokens, count):
    return tuple(seen.queries for seen in observe(model, cache, tokens, count))


def attended(model, monkeypatch):
    """Queries (B, 12, N, H) and LSEs that the model itself attends with over the whole text."""
    calls = []

    def spy(q, cache, positions, **settings):
        out, lse = attend(q, cache, positions, **settings)
        calls.append((q, lse))
        return out, lse

    monkeypatch.setattr(attention_module, "attend", spy)

    @jax.jit
    def run(model, cache):
        calls.clear()
        model(TOKENS, cache, count=jnp.asarray(LENGTHS))
        return list(calls)

    return run(model, model.init_cache(2, 16, codec="f32"))


@pytest.mark.parametrize("many", [1, 4, 9])
def test_queries_are_those_of_the_forward_pass(many, monkeypatch):
    model = decoder()
    got = queries(model, filled(model), newest(many), np.array([many, many]))
    for seen, (q, lse) in zip(got, attended(model, monkeypatch), strict=True):
        columns = LENGTHS[:, None] - many + np.arange(many)
        assert seen.positions.tolist() == columns.tolist()
        for row, at in enumerate(columns):
            np.testing.assert_allclose(seen.q[row], q[row, at], atol=1e-4)
            np.testing.assert_allclose(seen.lse[row], lse[row, at], atol=1e-4)


def test_of_layers_that_share_the_one_that_makes_keys_is_seen(monkeypatch):
    """The others attend, too: layer 2 has the queries that it has behind them."""
    model = decoder(SHARING)
    got = queries(model, filled(model), newest(4), np.array([4, 4]))
    every = attended(model, monkeypatch)
    assert len(every) == 4
    for seen, (q, lse) in zip(got, every[::2], strict=True):
        for row, at in enumerate(LENGTHS[:, None] - 4 + np.arange(4)):
            np.testing.assert_allclose(seen.q[row], q[row, at], atol=1e-4)
            np.testing.assert_allclose(seen.lse[row], lse[row, at], atol=1e-4)


def test_unrotated_queries_rotate_to_what_attends():
    model = decoder()
    for seen in queries(model, filled(model), newest(4), np.array([4, 4])):
        np.testing.assert_allclose(ROPE(seen.unrotated, seen.positions), seen.q, atol=1e-5)


def test_padding_is_no_query():
    model = decoder()
    tokens = newest(4)
    tokens[1] = np.roll(tokens[1], -2)
    got = queries(model, filled(model), tokens, np.array([4, 2]))
    want = queries(model, filled(model), newest(2), np.array([2, 2]))
    for padded, short in zip(got, want, strict=True):
        assert padded.positions[1].tolist() == [7, 8, -1, -1]
        np.testing.assert_allclose(padded.q[1, :2], short.q[1], atol=1e-5)


def test_later_tokens_are_not_seen():
    """Causal: what a row holds beyond the tokens that are run again changes no query of theirs."""
    model = decoder()
    early, late = np.array([8, 5], np.int32), filled(model)
    hidden = Cache(tuple(replace(layer, n=jnp.asarray(early)) for layer in late.layers))
    got = queries(model, hidden, newest(4, early), np.array([4, 4]))
    want = queries(model, filled(model, early), newest(4, early), np.array([4, 4]))
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


def test_nothing_is_observed_where_nothing_is_asked():
    model = decoder()
    run = jax.jit(lambda model, cache: [s.pos for s in observe(model, cache, None, None)])
    cache = filled(model)
    assert [s.queries for s in observe(model, cache, None, None)] == [None] * 3
    for pos in run(model, cache):
        assert pos[:, 0].tolist() == [[*range(n), *[-1] * (16 - n)] for n in (12, 9)]


def test_the_model_is_left_as_it_is():
    model = decoder()
    before = jax.tree.map(np.asarray, model)
    jax.block_until_ready(observe(model, filled(model), newest(2), np.array([2, 2]))[0].queries)
    assert all(type(layer.attention).__name__ == "Attention" for layer in model.layers)
    jax.tree.map(np.testing.assert_array_equal, before, model)


def test_other_modules_are_refused():
    model = decoder()
    model.layers[1].attention = model.layers[1].mlp
    with pytest.raises(ValueError, match=r"layers\[1\].attention: got \w+; accepted: Attention"):
        observe(model, filled(decoder()), None, None)
