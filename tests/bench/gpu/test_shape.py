"""Shapes, their arrays, and the oracle, against the library's reference and its sizing."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import sizing
from kvjax.bench.gpu import presets
from kvjax.bench.gpu.oracle import Difference, difference, expected, tolerance
from kvjax.bench.gpu.shape import DecodeShape, attend, normal, operands, queries

BASE = DecodeShape(4, 8, 2, 64, (0, 1, 65, 190))
PAGED = replace(BASE, page_size=16)
LATENT = DecodeShape(4, 16, 1, 128, (0, 1, 65, 190), rope_dim=64)
SHAPES = {
    "bf16": BASE,
    "f32": replace(BASE, codec="f32", query="f32", value_dim=32),
    "window": replace(BASE, window=50),
    "soft cap": replace(BASE, soft_cap=5.0),
    "sinks": replace(BASE, sinks=True),
    "lengths of heads": replace(BASE, length=((0, 3), (4, 190), (65, 64), (7, 8))),
    "pages": PAGED,
    "pages, token scales": replace(PAGED, codec="fp8_e4m3", scales="token"),
    "pages, lengths of heads": replace(PAGED, length=((0, 3), (4, 190), (65, 64), (7, 8))),
    "tensor scales": replace(BASE, codec="fp8_e5m2", scales="tensor", query="f16"),
    "head scales": replace(BASE, codec="int8", scales="head"),
    "token scales": replace(BASE, codec="int8", scales="token"),
    "latents": LATENT,
    "latents, pages": replace(LATENT, page_size=16),
}


@pytest.mark.parametrize("name", SHAPES)
def test_oracle_and_reference_agree(name):
    """Two definitions that share no code, over arrays that hold NaN where nothing is live."""
    shape = SHAPES[name]
    q, given = queries(shape), operands(shape, poisoned=True)
    out, lse = attend(shape, q, given, implementation="reference", return_lse=True)
    far = difference(shape, q, given, out, lse)
    assert far.within(tolerance(shape)), far
    assert np.isfinite(np.asarray(out, np.float64)).all()


def planted(name, shape, q, given, out):
    """A wrong output."""
    match name:
        case "zero":
            return jnp.zeros_like(out)
        case "NaN in one place":
            return out.at[3, 7, 5].set(jnp.nan)
        case "heads swapped":
            return out[:, ::-1]
        case "values of keys":
            return attend(shape, q, given | {"v": given["k"]})
        case "one slot less":
            return attend(shape, q, given | {"lengths": jnp.maximum(given["lengths"] - 1, 0)})
        case "a window off by one":
            return attend(replace(shape, window=shape.window + 1), q, given)
        case "an empty row that is not 0":
            return out.at[0, 0, 0].set(0.1)


@pytest.mark.parametrize(
    "name",
    [
        "zero",
        "NaN in one place",
        "heads swapped",
        "values of keys",
        "one slot less",
        "a window off by one",
        "an empty row that is not 0",
    ],
)
def test_a_wrong_output_is_seen(name):
    shape = replace(BASE, window=50)
    q, given = queries(shape), operands(shape)
    wrong = planted(name, shape, q, given, attend(shape, q, given))
    assert not difference(shape, q, given, wrong).within(tolerance(shape))


def test_a_wrong_lse_is_seen():
    q, given = queries(BASE), operands(BASE)
    out, lse = attend(BASE, q, given, return_lse=True)
    assert difference(BASE, q, given, out, lse).within(tolerance(BASE))
    for wrong in (lse.at[3, 7].add(0.02), lse.at[0, 0].set(-1e30), lse * jnp.log2(jnp.e)):
        assert not difference(BASE, q, given, out, wrong).within(tolerance(BASE))
    assert not Difference(float("nan"), 0.0).within(tolerance(BASE))


def test_only_the_heads_asked_for_are_looked_at():
    q, given = queries(BASE), operands(BASE)
    out = attend(BASE, q, given).at[1, 0, 0].set(9.0)
    assert difference(BASE, q, given, out, heads=[(0, 0), (3, 1)]).within(tolerance(BASE))
    assert difference(BASE, q, given, out, heads=[(1, 0)]).out > 1


def test_large_arrays_are_read_in_place(monkeypatch):
    """The same as through a copy of all of them."""
    for shape in (BASE, PAGED, LATENT):
        q, given = queries(shape), operands(shape)
        small = expected(shape, q, given, 3, 0)
        monkeypatch.setattr("kvjax.bench.gpu.oracle.SMALL_BYTES", 0)
        for a, b in zip(small, expected(shape, q, given, 3, 0), strict=True):
            np.testing.assert_array_equal(a, b)
        monkeypatch.undo()


def test_dead_slots_are_poisoned_and_live_ones_are_not():
    given = operands(replace(PAGED, codec="fp8_e4m3", scales="token"), poisoned=True)
    table, poisoned = np.asarray(given["page_table"]), np.isnan(np.asarray(given["k_scale"]))
    k = np.isnan(np.asarray(given["k"], np.float32)).all(-1)
    np.testing.assert_array_equal(k, poisoned)
    assert (~poisoned).sum() == 2 * (0 + 1 + 65 + 190)
    assert poisoned.all((1, 2)).sum() == 3, "pages of no row"
    used = np.concatenate([table[row, :n] for row, n in enumerate((0, 1, 5, 12))])
    assert len(set(used)) == len(used)
    assert (np.diff(used) != 1).any(), "in no order"
    assert {-1, 2**30, -(2**31)} <= set(table.ravel())
    codes = operands(replace(BASE, codec="int8", scales="head"), poisoned=True)
    assert (np.asarray(codes["k"])[0] == 127).all()


def test_numbers_are_nearly_normal_and_of_their_place_alone():
    x = np.asarray(normal((100, 64, 33), jnp.float32, jnp.uint32(3)))
    assert abs(x.mean()) < 0.01
    assert abs(x.std() - 1) < 0.01
    for axis in range(3):
        y = np.moveaxis(x, axis, 0)
        assert abs(np.corrcoef(y[1:].ravel(), y[:-1].ravel())[0, 1]) < 0.01
    other = np.asarray(normal((100, 64, 33), jnp.float32, jnp.uint32(4)))
    assert abs(np.corrcoef(x.ravel(), other.ravel())[0, 1]) < 0.01
    np.testing.assert_array_equal(x, normal((100, 64, 33), jnp.float32, jnp.uint32(3)))


@pytest.mark.parametrize(
    ("shape", "codec"),
    [
        (DecodeShape(32, 32, 8, 128, 8192), "bf16"),
        (DecodeShape(32, 32, 8, 128, 8192, value_dim=64), "bf16"),
        (DecodeShape(32, 32, 8, 128, 8192, codec="fp8_e4m3", scales="token"), "fp8_e4m3_token"),
        (DecodeShape(32, 32, 8, 128, 8192, codec="int8", scales="token"), "int8"),
        (DecodeShape(32, 128, 1, 512, 8192, rope_dim=64), "bf16"),
    ],
)
def test_bytes_and_flop_are_those_of_sizing(shape, codec):
    latent = {"kind": "latent", "latent_rank": 512, "rope_dim": 64} if shape.rope_dim else {}
    layer = sizing.LayerSpec(
        shape.query_heads, shape.kv_heads, shape.key_dim, shape.columns, **latent
    )
    assert shape.bytes_per_step == 32 * layer.record_bytes(8192, sizing.codec(codec))
    assert shape.flop_per_step == 32 * layer.decode_flop(8192)
    assert shape.allocated_bytes == shape.bytes_per_step


def test_only_what_is_seen_is_counted():
    assert BASE.bytes_per_step == (0 + 1 + 65 + 190) * 2 * (64 + 64) * 2
    assert replace(BASE, window=50).seen == 2 * (0 + 1 + 50 + 50)
    assert BASE.allocated_bytes == 4 * 192 * 2 * (64 + 64) * 2
    pages = 0 + 1 + 5 + 12 + 3
    assert PAGED.allocated_bytes == pages * 16 * 2 * (64 + 64) * 2


def test_arrays_are_as_many_bytes_as_the_shape_says():
    for shape in (*SHAPES.values(), *(presets.quick(p).shape for p in presets.points())):
        given = jax.eval_shape(lambda shape=shape: operands(shape))
        caches = (
            "k",
            "v",
            "latent",
            "k_rope",
            *(["k_scale", "v_scale"] * (shape.scales == "token")),
        )
        found = sum(
            given[name].size * given[name].dtype.itemsize for name in caches if name in given
        )
        assert found == shape.allocated_bytes, shape
