from dataclasses import replace

import numpy as np
import pytest

from kvjax import sizing
from kvjax.bench.case import Case, Inputs, grid

GQA = Case(4, 32, 8, 128, length=8192, capacity=8192, codec="f32")


def test_figures_known_by_hand():
    # 4 rows x 8 heads x 8192 tokens x (128 + 128) numbers x 4 bytes.
    assert GQA.bytes_per_step == GQA.allocated_bytes == 268_435_456
    # 4 rows x 32 heads x 8192 tokens x (128 + 128) products, two FLOP each.
    assert GQA.flop_per_step == 536_870_912
    live = replace(GQA, length=1024, capacity=32768, codec="bf16")
    assert (live.bytes_per_step, live.allocated_bytes) == (16_777_216, 536_870_912)


@pytest.mark.parametrize("codec", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("kv_heads", [32, 8, 1])
def test_agrees_with_sizing(kv_heads, codec):
    case = replace(GQA, kv_heads=kv_heads, codec=codec)
    spec = sizing.ModelSpec("one layer", 4096, (case.layer,))
    cache = spec.cache_bytes(8192, 4, codec)
    assert case.bytes_per_step == cache.read_per_step
    assert case.allocated_bytes == cache.allocated
    assert case.flop_per_step / case.bytes_per_step == spec.intensity(codec)


def test_arrays_are_as_large_as_the_arithmetic_says():
    case = Case(2, 6, 3, 16, length=5, capacity=9, codec="fp16")
    inputs = Inputs(case)
    assert case.codec == "f16"
    assert inputs.q.shape == (2, 6, 16)
    assert inputs.k.shape == inputs.v.shape == (2, 3, 9, 16)
    assert inputs.k.nbytes + inputs.v.nbytes == case.allocated_bytes
    assert inputs.lengths.tolist() == [5, 5]
    assert inputs.k.dtype == inputs.q.dtype == np.float16
    k, v = inputs.token_major
    np.testing.assert_array_equal(k[1, 4, 2], inputs.k[1, 2, 4])
    np.testing.assert_array_equal(v[1, 4, 2], inputs.v[1, 2, 4])
    # Keys, values and queries are different numbers, and so are rows and heads.
    parts = [inputs.q[0, 0], *inputs.k[:, :, 0].reshape(-1, 16), *inputs.v[:, :, 0].reshape(-1, 16)]
    assert len({tuple(np.asarray(part).tolist()) for part in parts}) == 13


def test_grid_crosses_everything():
    sizes = {"batch": [1, 2], "kv_heads": [4, 1], "head_dim": [8], "length": [16, 32]}
    cases = grid(query_heads=4, capacity=None, codec=["f32", "bf16"], **sizes)
    assert len(set(cases)) == 16
    assert all(case.capacity == case.length for case in cases)
    roomy = grid(query_heads=4, capacity=64, codec=["f32"], **sizes)
    assert {(case.length, case.capacity) for case in roomy} == {(16, 64), (32, 64)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 9000}, "length=9000: at most the capacity, 8192"),
        ({"kv_heads": 5}, "kv_heads: got 5 for 32 query heads"),
        ({"codec": "fp8"}, "accepted here are f32"),
        ({"codec": "f31"}, "codec: got 'f31'"),
        ({"batch": 0}, "batch: got 0"),
    ],
)
def test_refuses_what_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(GQA, **changes)
