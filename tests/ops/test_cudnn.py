"""When cuDNN serves a prefill, and with which arguments it is called."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops import cudnn, implementations, prefill_attention, reference
from kvjax.ops.devices import Gpu
from kvjax.ops.implementations import choose
from kvjax.ops.online import ScoreRule

H100, A100, V100, B300 = (Gpu(capability, 100) for capability in ((9, 0), (8, 0), (7, 0), (10, 3)))


def obstacle(gpu, *, dim=128, value_dim=None, dtype="bfloat16", k_dtype=None, **settings):
    shapes = (
        jax.ShapeDtypeStruct((1, 4, 8, dim), dtype),
        jax.ShapeDtypeStruct((1, 2, 4, dim), k_dtype or dtype),
        jax.ShapeDtypeStruct((1, 2, 4, value_dim or dim), dtype),
    )
    unused = {"chunk": None, "soft_cap": None, "sink_logits": None, "return_lse": False}
    return cudnn.obstacle(gpu, *shapes, **unused | settings)


@pytest.mark.parametrize(
    ("gpu", "case"),
    [
        (A100, {}),
        (A100, {"dtype": "float16", "dim": 80}),
        (H100, {"dim": 256}),
        (B300, {"dim": 256}),
    ],
    ids=str,
)
def test_it_serves(gpu, case):
    assert obstacle(gpu, **case) is None


@pytest.mark.parametrize(
    ("gpu", "case", "reason"),
    [
        (None, {}, "CUDA GPU"),
        (V100, {}, "compute capability 8.0"),
        (H100, {"dtype": "float32"}, "float32"),
        (H100, {"k_dtype": "float16"}, "float16"),
        (A100, {"dim": 256}, "up to 128, not 256"),
        (H100, {"dim": 264}, "up to 256, not 264"),
        (H100, {"dim": 68}, "multiple of 8"),
        (H100, {"value_dim": 64}, "not 128 and 64"),
        (H100, {"chunk": 8}, "no chunks"),
        (H100, {"soft_cap": 30.0}, "soft cap"),
        (H100, {"sink_logits": jnp.zeros(8)}, "learned sinks"),
        (H100, {"return_lse": True}, "LSE"),
    ],
    ids=str,
)
def test_it_does_not_serve(gpu, case, reason):
    assert reason in obstacle(gpu, **case)


def test_the_best_that_can_is_chosen():
    table = {"cudnn": 1, "xla": 2}
    assert choose(None, table) == 1
    assert choose(None, table, {"cudnn": None}) == 1
    assert choose(None, table, {"cudnn": "no GPU"}) == 2
    assert choose("xla", table) == 2
    with pytest.raises(ValueError, match="'cudnn': no GPU; accepted here are None, 'xla'"):
        choose("cudnn", table, {"cudnn": "no GPU"})


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lengths", [[20, 20, 20], [0, 6, 20]], ids=str)
def test_its_arguments_mean_the_same(window, lengths, draw, assert_same, monkeypatch):
    """jax.nn's own XLA implementation in its place: only rows without keys may differ."""
    peer = jax.nn.dot_product_attention

    def stand_in(*args, implementation, **settings):
        assert implementation == "cudnn"
        return peer(*args, implementation="xla", **settings)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    inputs = draw(3, (6, 2), 20, (16, 16), tokens=20)
    rule = ScoreRule(0.3, None, window)
    got = cudnn.prefill(*inputs, jnp.array(lengths), None, rule)
    want, _ = reference.prefill(*inputs, jnp.array(lengths), None, rule)
    assert_same((got[0], want), (want, None))


def test_a_gpu_would_get_it(draw, monkeypatch):
    """With a GPU in sight and nothing in the way, it is the one that None stands for."""
    called = []

    def stand_in(q, *args):
        called.append(q.dtype)
        return jnp.zeros_like(q), None

    implementations.warn_once.cache_clear()
    monkeypatch.setitem(prefill_attention.__globals__, "current_gpu", lambda: H100)
    monkeypatch.setitem(prefill_attention.__globals__["IMPLEMENTATIONS"], "cudnn", stand_in)
    run = partial(prefill_attention, *draw(1, (2, 1), 4, (8, 8), tokens=4, dtype="bfloat16"))
    run()
    assert called == [jnp.bfloat16]
    with pytest.warns(UserWarning, match="'xla' and not as 'cudnn': it has neither a soft cap"):
        assert np.asarray(run(soft_cap=5.0), np.float32).any()
    assert called == [jnp.bfloat16]
    with warnings.catch_warnings(action="error"):
        run(soft_cap=5.0)
