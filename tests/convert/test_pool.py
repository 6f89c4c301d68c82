"""Pooling of KV heads: grouping, exactness, and each method's definition."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from kvjax.convert import METHODS, check_kv_heads, pool_heads, tensor_rng

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [BF16, np.dtype(np.float16), np.dtype(np.float32)]


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def pool(x, heads, new_heads, method="mean", name="k"):
    return pool_heads(x, heads, new_heads, method, tensor_rng(0, name))


def test_groups_are_consecutive_heads():
    x = np.repeat(np.arange(4, dtype=np.float32), 2)[None]  # head h holds the value h, H = 2
    assert pool(x, 4, 2).tolist() == [[0.5, 0.5, 2.5, 2.5]]
    assert pool(x, 4, 2, "first").tolist() == [[0, 0, 2, 2]]


def test_biases_and_norms_are_pooled():
    bias = np.float32([1, 1, 3, 3, 5, 6, 7, 8])  # 4 heads of 2
    assert pool(bias, 4, 2).tolist() == [2, 2, 6, 7]
    assert pool(bias, 4, 1).tolist() == [4, 4.5]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("group", range(1, 13))
@pytest.mark.parametrize("method", ["mean", "first"])
def test_equal_heads_come_back_bit_for_bit(dtype, group, method):
    # Widely spread magnitudes, so that sums in the source precision would round.
    heads = (normal(5, 2, 8) * 10.0 ** normal(5, 2, 8, seed=1)).astype(dtype)
    heads[0, 0, 0] = -0.0
    expanded = np.repeat(heads, group, axis=1)
    pooled = pool(expanded.reshape(5, -1), 2 * group, 2, method)
    assert pooled.dtype == dtype
    assert pooled.tobytes() == heads.reshape(5, -1).tobytes()


def test_bf16_is_not_summed_in_bf16():
    assert pool(np.array([1.0, 1.0078125, 1.015625], BF16), 3, 1).tolist() == [1.0078125]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mean_is_the_nearest_value_to_the_exact_mean(dtype):
    x = normal(7, 6, 4, dtype=dtype)
    pooled = pool(x.reshape(7, -1), 6, 2).reshape(7, 2, 4)
    for row, j, h in np.ndindex(pooled.shape):
        exact = sum(Fraction(float(v)) for v in x[row, 3 * j : 3 * j + 3, h]) / 3
        value = pooled[row, j, h]
        neighbours = [np.nextafter(value, dtype.type(s)) for s in (-np.inf, np.inf)]
        error = abs(Fraction(float(value)) - exact)
        assert all(error <= abs(Fraction(float(n)) - exact) for n in neighbours)


@pytest.mark.parametrize("method", METHODS)
def test_transposed_views_pool_the_same_in_their_own_order(method):
    stored = normal(24, 10)  # (heads * H, D), as torch stores it
    pooled = pool(stored.T, 6, 3, method)
    np.testing.assert_array_equal(pooled, pool(np.ascontiguousarray(stored.T), 6, 3, method))
    assert pooled.T.flags.c_contiguous
    assert not np.shares_memory(pooled, stored)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_random_has_the_standard_deviation_of_the_whole_tensor(dtype):
    x = (5 + 3 * normal(256, 64)).astype(dtype)  # a mean that must not enter
    x[:, :32] *= 0.5  # groups that differ: one deviation serves them all
    pooled = pool(x, 8, 4, "random").astype(np.float64)
    assert pooled.shape == (256, 32)
    deviation = np.std(x.astype(np.float64))
    np.testing.assert_allclose(pooled.reshape(-1, 2, 16).std((0, 2)), deviation, rtol=0.05)
    assert abs(pooled.mean()) < 0.05 * deviation


def test_random_depends_on_seed_and_name_alone():
    x = normal(8, 16)
    again, other_name = pool(x, 4, 2, "random", "k"), pool(x, 4, 2, "random", "v")
    other_seed = pool_heads(x, 4, 2, "random", tensor_rng(1, "k"))
    np.testing.assert_array_equal(pool(x, 4, 2, "random", "k"), again)
    assert (again != other_name).all()
    assert (again != other_seed).all()


def test_a_constant_bias_stays_without_noise():
    assert pool(np.zeros(8, np.float32), 4, 2, "random").tolist() == [0] * 4


@pytest.mark.parametrize("given", [0, -1, 5, 24])
def test_kv_heads_must_divide(given):
    message = rf"num_heads={given} does not divide the checkpoint's 12 KV heads; accepted: 1, 2, 3"
    with pytest.raises(ValueError, match=message):
        check_kv_heads(given, 12, "num_heads")
    with pytest.raises(ValueError, match="kv_heads"):
        pool(normal(12), 12, given)
    for divisor in (1, 2, 3, 4, 6, 12):
        check_kv_heads(divisor, 12)


def test_other_bad_input_is_named():
    with pytest.raises(ValueError, match="'median' is unknown; accepted: mean, first, random"):
        pool(normal(8), 4, 2, "median")
    with pytest.raises(ValueError, match="dtype int8 cannot be pooled; accepted: bfloat16"):
        pool(np.zeros(8, np.int8), 4, 2)
    with pytest.raises(ValueError, match="last axis of 10 is not a whole number of 4 heads"):
        pool(normal(3, 10), 4, 2)
