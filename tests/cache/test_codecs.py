"""Codecs by themselves: bounds, golden bytes, zeros, extremes, rows apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import sizing
from kvjax.cache import Record
from kvjax.cache.bits import to_fp8
from kvjax.cache.codecs import (
    Int4,
    build_codec,
    empty_leaves,
    pack_nibbles,
    plain_codec,
    unpack_nibbles,
)

HEADS, TOKENS, KEY_DIM, VALUE_DIM = 2, 3, 40, 5
RECORD = Record(
    jnp.asarray(np.random.default_rng(0).normal(size=(2, HEADS, TOKENS, KEY_DIM)), jnp.float32),
    jnp.asarray(np.random.default_rng(1).normal(size=(2, HEADS, TOKENS, VALUE_DIM)), jnp.float32),
)
# Half a unit in the last place, of a number's own size: 2**-p for p bits of significand.
RELATIVE = {
    "f32": 0.0,
    "bf16": 2**-8,
    "f16": 2**-11,
    "fp8_e4m3": 2**-4,
    "fp8_e5m2": 2**-3,
    "fp8_e4m3_head": 2**-4,
    "fp8_e4m3_token": 2**-4,
    "fp8_ds_mla": 2**-4,
}
# Half a step, of the largest number that shares the scale.
OF_LARGEST = {"int8": 0.5 / 127, "int4": 0.51 / 7}
NAMES = [*RELATIVE, *OF_LARGEST]


def build(name):
    return build_codec(name, KEY_DIM, VALUE_DIM)


def round_trip(name, record, scales=None):
    codec = build(name)
    constants = codec.scales(HEADS, HEADS) if scales is None else scales
    return codec.decode(codec.encode(record, constants), constants)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_back_is_within_the_bound(name):
    for original, decoded in zip(RECORD, round_trip(name, RECORD), strict=True):
        error = np.abs(np.asarray(decoded, np.float64) - original)
        if name in RELATIVE:
            # Below its smallest normal number an 8-bit float has a fixed step.
            assert (error <= RELATIVE[name] * np.abs(original) + 2**-10).all()
        else:
            assert (error <= OF_LARGEST[name] * np.abs(original).max(-1, keepdims=True)).all()
        assert (name == "f32") == (error.max() == 0)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_that_sizing_counts(name):
    codec = build(name)
    leaves = empty_leaves(codec, 3, 7, HEADS, HEADS, KEY_DIM, VALUE_DIM)
    spec = sizing.codec(name)
    parts = (sizing.Part(HEADS, KEY_DIM, True), sizing.Part(HEADS, VALUE_DIM, False))
    live = sum(leaf.nbytes for leaf in leaves.values())
    assert live == 3 * sum(spec.allocated(7, part) for part in parts)
    constants = sum(scale.nbytes for scale in codec.scales(HEADS, HEADS).values())
    assert constants == sum(spec.constants(part) for part in parts)


@pytest.mark.parametrize("name", NAMES)
def test_encoding_is_token_by_token_and_row_by_row(name):
    """Each token's codes depend on nothing else: streamed codes are those of all at once."""
    codec = build(name)
    scales = codec.scales(HEADS, HEADS)
    whole = codec.encode(RECORD, scales)
    for token in range(TOKENS):
        alone = codec.encode(Record(*(x[1:, :, token : token + 1] for x in RECORD)), scales)
        for part, leaf in alone.items():
            np.testing.assert_array_equal(leaf, whole[part][1:, :, token : token + 1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, 1e-30, 3e38, -3e38], ids=str)
def test_finite_input_gives_finite_output(name, value):
    if name == "f16" and abs(value) > 1e5:
        pytest.skip("beyond the range of fp16")
    record = Record(*(jnp.full_like(x, value) for x in RECORD))
    for original, decoded in zip(record, round_trip(name, record), strict=True):
        assert np.isfinite(np.asarray(decoded, np.float32)).all()
        if value == 0:
            np.testing.assert_array_equal(decoded, original)


def test_nibbles():
    """Low nibble first, an odd number of codes, and the sign."""
    codes = jnp.array([-8, -1, 0, 7, 3], jnp.int8)
    packed = pack_nibbles(codes)
    assert packed.dtype == jnp.uint8
    assert packed.tolist() == [0xF8, 0x70, 0x03]
    np.testing.assert_array_equal(unpack_nibbles(packed, 5), codes)
    every = jnp.arange(-8, 8, dtype=jnp.int8)
    np.testing.assert_array_equal(unpack_nibbles(pack_nibbles(every), 16), every)


def test_golden_codes_of_int8_and_int4():
    """A scale of 1: the largest number is 127, or 7; halves go to the even code."""
    k = jnp.array([[[[127.0, -127.0, 0.4, 2.5, -3.5]]]])
    leaves = build_codec("int8", 5, 5).encode(Record(k, k), {})
    assert leaves["k"].tolist() == [[[[127, -127, 0, 2, -4]]]]
    assert leaves["k_scale"].tolist() == [[[1.0]]]
    k = jnp.array([[[[7.0, -7.0, 0.4, 2.5, -3.5]]]])
    leaves = build_codec("int4", 5, 5).encode(Record(k, k), {})
    assert leaves["k"].tolist() == [[[[0x97, 0x20, 0x0C]]]]
    assert leaves["k_scale"].tolist() == [[[[1.0]]]]


def test_int4_scales_groups_apart():
    k = jnp.concatenate([jnp.full((1, 1, 1, 32), 7.0), jnp.full((1, 1, 1, 8), 0.07)], -1)
    leaves = Int4(key_dim=40, value_dim=40).encode(Record(k, k), {})
    np.testing.assert_allclose(leaves["k_scale"][0, 0, 0], [1.0, 0.01], rtol=1e-3)


def test_fp8_saturates():
    big = jnp.array([447.0, 448.0, 500.0, 1e9, -1e9])
    assert to_fp8(big, jnp.float8_e4m3fn).astype(jnp.float32).tolist() == [
        448.0,
        448.0,
        448.0,
        448.0,
        -448.0,
    ]
    assert to_fp8(big, jnp.float8_e5m2).astype(jnp.float32).tolist()[-1] == -57344.0


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("fp8_e4m3", {"k_scale": jnp.float32(0.01), "v_scale": jnp.float32(0.02)}),
        ("fp8_e4m3_head", {"k_scale": jnp.array([0.01, 0.1]), "v_scale": jnp.array([0.1, 0.01])}),
    ],
)
def test_calibrated_scales_are_used_and_undone(name, scales):
    leaves = build(name).encode(RECORD, scales)
    factor = scales["k_scale"] if name == "fp8_e4m3" else scales["k_scale"][:, None, None]
    assert leaves["k"].dtype == jnp.uint8
    stored = leaves["k"].view(jnp.float8_e4m3fn)
    np.testing.assert_array_equal(stored, to_fp8(RECORD.k / factor, jnp.float8_e4m3fn))
    for original, decoded in zip(RECORD, round_trip(name, RECORD, scales), strict=True):
        np.testing.assert_allclose(decoded, original, rtol=2**-4, atol=1e-3)


@pytest.mark.parametrize(("spelling", "name"), [("fp32", "f32"), ("fp16", "f16")])
def test_other_spellings(spelling, name):
    assert build(spelling) == build(name)


def test_a_codec_that_only_sizing_knows_is_refused():
    with pytest.raises(ValueError, match="codec='nvfp4': caches can hold f32, bf16, f16"):
        build("nvfp4")


def test_codecs_that_store_numbers_as_they_are():
    assert plain_codec("fp32") == "f32"
    with pytest.raises(ValueError, match="codec='int8': accepted here are f32, bf16, f16"):
        plain_codec("int8")


def test_codecs_are_static():
    assert len({hash(build(name)) for name in NAMES}) == len(NAMES)
    encode = jax.jit(lambda codec, record: codec.encode(record, {}), static_argnums=0)
    assert encode(build("int8"), RECORD)["k"].dtype == jnp.int8
