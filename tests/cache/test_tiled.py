"""Tiles of e4m3 against FlashMLA's definition, in numpy and ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvjax.cache import Paged, Record, init_layer_cache
from kvjax.cache.codecs import build_codec
from kvjax.cache.tiled import TiledFp8

E4M3 = ml_dtypes.float8_e4m3fn
ROPE, RANK, TILE = 64, 300, 128
CODEC = build_codec("fp8_ds_mla", ROPE, RANK, rope_key=True)
encode, decode = jax.jit(CODEC.encode), jax.jit(CODEC.decode)


def record_of(latent, rope=None) -> Record:
    """A latent (..., L) and its rope key as a record of one row and head."""
    latent = np.atleast_2d(np.asarray(latent, np.float32))
    rope = np.zeros((len(latent), ROPE), np.float32) if rope is None else rope
    return Record(jnp.asarray(rope)[None, None], jnp.asarray(latent)[None, None])


def drawn(tokens=50, rank=RANK, dtype=np.float32) -> np.ndarray:
    """Latents (T, L) whose channels differ by some powers of ten."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(tokens, rank)) * 10 ** rng.uniform(-4, 4, size=(tokens, rank))
    return x.astype(dtype).astype(np.float32)


def by_definition(latent) -> tuple[np.ndarray, np.ndarray]:
    """Bytes (T, L) and scales (T, tiles): scale = 2 ** ceil(log2(amax / 448)), code = x / scale."""
    codes, scales = np.zeros(latent.shape, np.uint8), []
    for start in range(0, latent.shape[1], TILE):
        tile = latent[:, start : start + TILE].astype(np.float64)
        scale = 2.0 ** np.ceil(np.log2(np.abs(tile).max(1) / 448))
        codes[:, start : start + TILE] = (tile / scale[:, None]).astype(E4M3).view(np.uint8)
        scales.append(scale)
    return codes, np.stack(scales, axis=1)


@pytest.mark.parametrize("rank", [1, 12, 128, RANK, 512])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_codes_and_scales_are_those_of_the_definition(rank, dtype):
    latent = drawn(rank=rank, dtype=dtype)
    leaves = encode(record_of(latent, np.zeros((50, ROPE), dtype)), {})
    codes, scales = by_definition(latent)
    assert leaves["v"].dtype == jnp.uint8
    assert leaves["v_scale"].dtype == jnp.float32
    np.testing.assert_array_equal(leaves["v_scale"][0, 0], scales)
    np.testing.assert_array_equal(leaves["v"][0, 0], codes)
    read = decode(leaves, {}).v[0, 0]
    wide = np.repeat(scales, TILE, axis=1)[:, :rank]
    np.testing.assert_array_equal(read, codes.view(E4M3).astype(np.float64) * wide)


def test_the_rope_key_stays_in_bf16():
    rope = np.random.default_rng(1).normal(0, 1e3, size=(7, ROPE)).astype(np.float32)
    leaves = encode(record_of(drawn(7), rope), {})
    assert set(leaves) == {"k", "v", "v_scale"}
    read = decode(leaves, {}).k
    assert read.dtype == jnp.bfloat16
    bits = rope.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(np.asarray(read[0, 0]).view(np.uint16), bits)


def test_a_token_takes_656_bytes():
    """FlashMLA's 512 codes, 4 scales in f32 and 64 numbers in bf16."""
    sizes = {"kv_heads": 1, "key_dim": 64, "value_dim": 512}
    leaves = init_layer_cache(1, 1, **sizes, codec="fp8_ds_mla", rope_key=True).leaves
    assert {name: leaf.nbytes for name, leaf in leaves.items()} == {
        "k": 128,
        "v": 512,
        "v_scale": 16,
    }


@pytest.mark.parametrize(
    ("most", "scale"),
    [
        (448.0, 1.0),
        (np.nextafter(np.float32(448), np.float32(449)), 2.0),
        (np.nextafter(np.float32(448), np.float32(0)), 1.0),
        (224.0, 0.5),
        (448 * 2.0**30, 2.0**30),
        (448 * 2.0**-30, 2.0**-30),
        (449 * 2.0**-30, 2.0**-29),
        (2.0**-117, 2.0**-125),
        (2.0**-126, 2.0**-126),
        (0.0, 1.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_scale_is_the_least_power_of_two_that_fits(most, scale, sign):
    latent = np.zeros(RANK, np.float32)
    latent[TILE + 3] = sign * most
    leaves = encode(record_of(latent), {})
    assert leaves["v_scale"].tolist() == [[[[1.0, scale, 1.0]]]]
    largest = np.abs(np.asarray(leaves["v"]).view(E4M3).astype(np.float32)).max()
    assert largest == np.float32(most / scale).astype(E4M3) <= 448


@pytest.mark.parametrize("value", [1e-45, 1e-40, 3.3e38, np.finfo(np.float32).max], ids=str)
def test_what_no_scale_fits_stays_finite(value):
    """Subnormal numbers are as good as zero, and the largest become 448 * 2**119."""
    latent = np.full(RANK, value, np.float32)
    leaves = encode(record_of(latent), {})
    scale = np.asarray(leaves["v_scale"])
    np.testing.assert_array_equal(np.frexp(scale)[0], 0.5)
    read = np.asarray(decode(leaves, {}).v, np.float64)
    assert np.isfinite(read).all()
    np.testing.assert_allclose(read, np.broadcast_to(value, read.shape), rtol=1 / 8, atol=2**-126)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan], ids=str)
def test_what_is_not_finite_shows_in_its_tile_alone(value):
    latent = drawn(1)
    latent[0, TILE] = value
    read = np.asarray(decode(encode(record_of(latent), {}), {}).v)[0, 0, 0]
    assert not np.isfinite(read[TILE])
    assert np.isfinite(read[:TILE]).all()
    assert np.isfinite(read[2 * TILE :]).all()


def test_an_outlier_leaves_the_other_tiles_alone():
    latent = np.random.default_rng(2).normal(size=(20, RANK)).astype(np.float32)
    loud = latent.copy()
    loud[:, TILE + 5] = 1e6
    quiet, read = (np.asarray(decode(encode(record_of(x), {}), {}).v)[0, 0] for x in (latent, loud))
    others = np.r_[:TILE, 2 * TILE : RANK]
    np.testing.assert_array_equal(read[:, others], quiet[:, others])
    # What is below 2**-6 of its scale errs by up to half a step of 2**-9.
    error, scale = np.abs(read - loud), 2.0**12
    assert (error <= np.maximum(2**-4 * np.abs(loud), scale * 2**-10)).all()
    assert error[:, TILE : 2 * TILE].max() > 2
    assert (np.abs(quiet - latent) <= 2**-4 * np.abs(latent) + 2**-16).all()


def test_keys_of_heads_have_tiles_too():
    """Beside no latent there is no rope key: K and V are encoded alike."""
    codec = TiledFp8()
    x = drawn(6, 200).reshape(1, 2, 3, 200)
    leaves = codec.encode(Record(jnp.asarray(x), jnp.asarray(-x)), {})
    codes, scales = by_definition(x.reshape(6, 200))
    np.testing.assert_array_equal(np.asarray(leaves["k"]).reshape(6, 200), codes)
    np.testing.assert_array_equal(np.asarray(leaves["v"]).reshape(6, 200), codes ^ 0x80)
    for name in ("k_scale", "v_scale"):
        np.testing.assert_array_equal(np.asarray(leaves[name]).reshape(6, 2), scales)


@pytest.mark.parametrize("settings", [{}, {"layout": Paged(4)}, {"window": 6}], ids=str)
def test_caches_of_latents_hold_what_the_codec_gives(settings):
    """After rollback, select and eviction, bit for bit."""
    rope = np.random.default_rng(3).normal(size=(5, ROPE)).astype(np.float32)
    record, sizes = record_of(drawn(5), rope), {"kv_heads": 1, "key_dim": ROPE, "value_dim": RANK}

    @jax.jit
    def run(first, rest):
        cache = init_layer_cache(1, 12, **sizes, codec="fp8_ds_mla", rope_key=True, **settings)
        cache = cache.append(first, jnp.array([4])).rollback(2).select(jnp.array([0]))
        cache = cache.append(rest, jnp.array([3]))
        kept = cache.keep(jnp.array([[[0, 2, 4]]]), room=1)
        return cache.overflow, cache.block(jnp.int32(0)), kept.block(jnp.int32(0))

    other = Record(*(jnp.where(jnp.arange(4)[:, None] < 2, x[:, :, :4], 9) for x in record))
    overflow, *blocks = run(other, Record(*(x[:, :, 2:] for x in record)))
    assert not overflow.any()
    want = decode(encode(record, {}), {})
    for block, positions in zip(blocks, (range(5), (0, 2, 4)), strict=True):
        pos = np.asarray(block.pos)[0, 0]
        live = np.flatnonzero(pos >= 0)
        assert pos[live].tolist() == list(positions)
        np.testing.assert_array_equal(block.k[0, 0, live], want.k[0, 0, pos[live]])
        np.testing.assert_array_equal(block.v[0, 0, live], want.v[0, 0, pos[live]])
