"""Prefill attention: against its reference and jax.nn, forward and backward."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import rest_slow

from kvjax.ops import prefill_attention

LENGTHS = jnp.array([0, 1, 9, 20])
SETTINGS = {
    "plain": {},
    "window 1": {"window": 1},
    "window 4": {"window": 4},
    "window of all": {"window": 20},
    "ragged chunk": {"lengths": LENGTHS, "chunk": 7},
    "ragged": {"lengths": LENGTHS},
    "ragged window": {"lengths": LENGTHS, "window": 5},
    "cap and sinks": {"soft_cap": 2.0, "scale": 0.9, "sink_logits": jnp.linspace(-2, 2, 6)},
}


def jax_nn(q, k, v, *, window=None):
    # jax counts the keys before the query's own.
    local = None if window is None else (window - 1, 0)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local)


@pytest.mark.parametrize(
    "name", rest_slow(SETTINGS, ["window 4", "ragged chunk", "ragged window", "cap and sinks"])
)
@pytest.mark.usefixtures("small_blocks")
def test_tiles_give_the_reference(name, draw, assert_same):
    inputs = draw(4, (6, 2), 20, (24, 8), tokens=20)
    got, want = (
        prefill_attention(*inputs, return_lse=True, implementation=implementation, **SETTINGS[name])
        for implementation in ("xla", "reference")
    )
    assert_same(got, want)


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    rest_slow(
        [
            *((1, "float32"), (128, "float32"), (129, "bfloat16")),
            *((300, "float32"), (300, "bfloat16"), (300, "float16")),
        ],
        [(1, "float32"), (129, "bfloat16"), (300, "float16")],
    ),
)
def test_tiles_as_they_are(tokens, dtype, draw, assert_same):
    inputs = draw(1, (4, 2), tokens, (16, 16), tokens=tokens, dtype=dtype)
    got, want = (
        prefill_attention(*inputs, return_lse=True, implementation=implementation)
        for implementation in ("xla", "reference")
    )
    assert got[0].dtype == dtype
    assert got[1].dtype == jnp.float32
    assert_same(got, want)


@pytest.mark.parametrize(
    ("window", "dtype"),
    rest_slow(
        product([None, 1, 4, 140], ["float32", "bfloat16"]), [(None, "bfloat16"), (4, "float32")]
    ),
)
def test_jax_nn_agrees(window, dtype, draw, assert_same):
    inputs = draw(2, (6, 2), 140, (16, 16), tokens=140, dtype=dtype)
    got = prefill_attention(*inputs, window=window, return_lse=True)
    assert_same(got, (jax_nn(*inputs, window=window), None))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.usefixtures("small_blocks")
def test_chunks_attend_alone(implementation, draw, assert_same):
    """As if each were a text of its own; the last one is shorter."""
    q, k, v = draw(2, (6, 2), 20, (16, 8), tokens=20)
    got = prefill_attention(q, k, v, chunk=7, return_lse=True, implementation=implementation)
    for start, end in ((0, 7), (7, 14), (14, 20)):
        own = q[:, start:end], k[:, :, start:end], v[:, :, start:end]
        want = prefill_attention(*own, return_lse=True, implementation="reference")
        assert_same([x[:, start:end] for x in got], want)


def test_a_shifted_window_shows(draw, assert_same):
    """The comparison with jax.nn can fail."""
    inputs = draw(2, (6, 2), 20, (16, 16), tokens=20)
    got = prefill_attention(*inputs, window=4, return_lse=True)
    for window in (3, 5, None):
        with pytest.raises(AssertionError):
            assert_same(got, (jax_nn(*inputs, window=window), None))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_padding_takes_no_part(implementation, draw):
    q, k, v = draw(4, (4, 2), 20, (8, 8), tokens=20)
    clean = prefill_attention(q, k, v, lengths=LENGTHS, implementation=implementation)
    dead = (jnp.arange(20) >= LENGTHS[:, None])[:, None, :, None]
    k, v = (jnp.where(dead, jnp.nan, x) for x in (k, v))
    dirty, lse = prefill_attention(
        q, k, v, lengths=LENGTHS, return_lse=True, implementation=implementation
    )
    np.testing.assert_array_equal(dirty, clean)
    assert not dirty[0].any()
    assert np.isneginf(lse[0]).all()


def loss(function, *args, **settings):
    """A number to which every output and every finite LSE contributes."""
    out, lse = function(*args, return_lse=True, **settings)
    weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
    return (weights * out).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum()


@pytest.mark.parametrize("name", rest_slow(["ragged window", "cap and sinks"], ["cap and sinks"]))
@pytest.mark.usefixtures("small_blocks")
def test_gradients_in_float64(name, draw):
    with jax.enable_x64(True):
        settings = SETTINGS[name] | {"sink_logits": None}
        inputs = draw(4, (6, 2), 20, (8, 16), tokens=20, dtype=jnp.float64)
        if SETTINGS[name].get("sink_logits") is not None:
            inputs = (*inputs, jnp.linspace(-2, 2, 6, dtype=jnp.float64))

        def through(implementation):
            def run(q, k, v, sink_logits=None):
                chosen = settings | {"sink_logits": sink_logits, "implementation": implementation}
                return loss(prefill_attention, q, k, v, **chosen)

            return jax.jit(jax.grad(run, argnums=tuple(range(len(inputs)))))(*inputs)

        for got, want in zip(through("xla"), through("reference"), strict=True):
            assert np.abs(want).max() > 0.1
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_gradients_of_jax_nn_agree(draw):
    inputs = draw(2, (6, 2), 300, (16, 16), tokens=300)
    got, want = (
        jax.jit(jax.grad(lambda *args: jnp.sin(function(*args)).sum(), argnums=(0, 1, 2)))(*inputs)  # noqa: B023, called at once
        for function in (prefill_attention, jax_nn)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_backward_pass_keeps_no_scores():
    """Twice the tokens: twice the bytes, and not the four times of a score for every pair."""

    def bytes_at(function, tokens):
        q, kv = (
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in ((1, tokens, 8, 16), (1, 2, tokens, 16))
        )
        step = jax.jit(jax.grad(lambda *args: function(*args).sum(), argnums=(0, 1, 2)))
        return step.lower(q, kv, kv).compile().memory_analysis().temp_size_in_bytes

    def growth(function):
        return bytes_at(function, 4096) / bytes_at(function, 2048)

    assert growth(prefill_attention) < 2.5
    assert growth(jax_nn) > 3.5


@pytest.mark.parametrize(
    ("tokens", "window", "tiles"),
    [(512, None, 1 + 1 + 2 + 2), (512, 1, 4), (512, 129, 1 + 1 + 2 + 1), (513, None, 6 + 3)],
    ids=str,
)
def test_hidden_tiles_are_skipped(tokens, window, tiles, draw, updates):
    """Of tiles of 128 queries and 256 keys."""
    inputs = draw(1, (2, 1), tokens, (4, 4), tokens=tokens)
    prefill_attention(*inputs, window=window, implementation="xla")
    jax.effects_barrier()
    assert len(updates) == tiles


@pytest.mark.parametrize(
    ("changed", "settings", "message"),
    [
        ({"q": (2, 5, 4, 8)}, {}, "k is float32.2, 2, 6, 8.; accepted beside q .* are 5 tokens"),
        ({"q": (2, 6, 3, 8)}, {}, "multiple of 2 heads"),
        ({}, {"lengths": jnp.array([1, 7])}, "accepted are 0 to 6"),
        ({}, {"window": -1}, "window=-1"),
        ({}, {"chunk": 0}, "chunk=0; accepted are 1 and more tokens"),
        ({}, {"implementation": "mosaic_gpu"}, "None, 'xla', 'reference'"),
        ({}, {"implementation": "cudnn"}, "'cudnn': it needs a CUDA GPU.*None, 'xla', 'reference'"),
    ],
)
def test_what_does_not_fit_is_refused(changed, settings, message):
    shapes = {"q": (2, 6, 4, 8), "k": (2, 2, 6, 8), "v": (2, 2, 6, 8)} | changed
    with pytest.raises(ValueError, match=message):
        prefill_attention(*(jnp.zeros(shape) for shape in shapes.values()), **settings)
