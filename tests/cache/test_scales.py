"""Calibrated scales in a cache: on which head and array they act, and what they are for."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.cache import Kivi, LayerScales, Paged, Record, Scales, SinkRing, init_layer_cache
from kvjax.nn import AttentionConfig, Decoder, DecoderConfig, MlpConfig

HEADS, TOKENS, KEY_DIM, VALUE_DIM = 2, 3, 8, 4
# Powers of two, so that 448 times them, and the codes of it, are exact.
K_SCALE, V_SCALE = np.float32([0.25, 2.0]), np.float32([16.0, 0.5])


def layer(k=K_SCALE, v=V_SCALE, q=None) -> LayerScales:
    return LayerScales(np.float32(k), np.float32(v), q)


def scales(*layers, codec="fp8_e4m3_head") -> Scales:
    return Scales(codec, layers, "test", 1)


def model(layers=2) -> Decoder:
    attention = AttentionConfig(16, 4, HEADS, KEY_DIM, VALUE_DIM)
    return Decoder(DecoderConfig(20, 16, (attention,) * layers, MlpConfig(16)), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("layout", ["dense", Paged(2), SinkRing(1, 2)], ids=str)
def test_each_head_and_array_has_its_own(layout):
    """Numbers at the ends of each head's range are exact; with any two scales swapped none are."""
    sizes = {"key_dim": KEY_DIM, "value_dim": VALUE_DIM, "kv_heads": HEADS}
    given = {"k_scale": jnp.asarray(K_SCALE), "v_scale": jnp.asarray(V_SCALE)}
    cache = init_layer_cache(1, TOKENS, **sizes, layout=layout, codec="fp8_e4m3_head", scales=given)
    record = Record(
        *(
            jnp.broadcast_to(448 * scale[:, None, None], (1, HEADS, TOKENS, dim))
            for scale, dim in ((K_SCALE, KEY_DIM), (V_SCALE, VALUE_DIM))
        )
    )
    cache = cache.append(record, jnp.array([TOKENS]))
    stored = (leaf.view(jnp.float8_e4m3fn) for leaf in cache.leaves.values())
    assert all(leaf.astype(jnp.float32).max() == 448 for leaf in stored)
    block = cache.block(jnp.int32(0))
    live = np.asarray(block.pos)[0, 0] >= 0
    for decoded, original in ((block.k, record.k), (block.v, record.v)):
        np.testing.assert_array_equal(decoded[:, :, live], original[:, :, : live.sum()])


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp8_e4m3_head"])
@pytest.mark.parametrize("value", [3e38, -1e4, 1e-30, 0.0])
def test_what_exceeds_the_range_is_its_end_and_never_nan(name, value):
    shape = (HEADS,) if name.endswith("head") else ()
    given = {part: jnp.full(shape, 0.01, jnp.float32) for part in ("k_scale", "v_scale")}
    sizes = {"key_dim": KEY_DIM, "value_dim": VALUE_DIM, "kv_heads": HEADS}
    cache = init_layer_cache(1, 1, **sizes, codec=name, scales=given)
    record = Record(*(jnp.full((1, HEADS, 1, dim), value) for dim in (KEY_DIM, VALUE_DIM)))
    block = cache.append(record, jnp.array([1])).block(jnp.int32(0))
    end = 0.01 * (57344 if name == "fp8_e5m2" else 448)
    for decoded in (block.k, block.v):
        tolerance = 2**-3 * min(abs(value), end) + 0.01 * 2**-10
        np.testing.assert_allclose(decoded, np.clip(value, -end, end), rtol=0, atol=tolerance)


def test_a_model_takes_them_layer_by_layer():
    """Layers of other codecs have no use for them, and none is needed there."""
    one, other = layer(), layer(V_SCALE, K_SCALE)
    cache = model().init_cache(1, 4, codec="fp8_e4m3_head", scales=scales(one, other))
    for held, given in zip(cache.layers, (one, other), strict=True):
        np.testing.assert_array_equal(held.scales["k_scale"], given.k_scale)
        np.testing.assert_array_equal(held.scales["v_scale"], given.v_scale)
    mixed = ["bf16", "fp8_e4m3_head"]
    for given in (scales(one, other), scales(None, other)):
        cache = model().init_cache(1, 4, codec=mixed, scales=given)
        assert cache.layers[0].scales == {}
        np.testing.assert_array_equal(cache.layers[1].scales["k_scale"], other.k_scale)
    assert model().init_cache(1, 4, codec=Kivi(4, 4, 8), scales=scales(one, other)).nbytes


def test_a_donated_cache_leaves_them_as_they_are():
    given = scales(layer(), layer())
    for _ in range(2):
        for held in model().init_cache(1, 4, codec="fp8_e4m3_head", scales=given).layers:
            held.scales["k_scale"].delete()
    np.testing.assert_array_equal(given.layers[0].k_scale, K_SCALE)


@pytest.mark.parametrize(
    ("codec", "given", "message"),
    [
        (
            "fp8_e4m3",
            scales(layer(), layer()),
            "got those of fp8_e4m3_head; accepted: of codec fp8",
        ),
        ("fp8_e4m3_head", scales(layer()), "got none for layer 1; accepted"),
        ("fp8_e4m3_head", scales(layer(), None), "got none for layer 1; accepted"),
        (
            "fp8_e4m3_head",
            scales(layer([1] * 3, [1] * 3), layer()),
            "got 3 of k_scale for layer 0; accepted: one for each of its 2 heads",
        ),
        (
            "fp8_e4m3_head",
            scales(layer(v=[1]), layer()),
            "got 1 of v_scale for layer 0; accepted: one for each of its 2 heads",
        ),
    ],
)
def test_scales_of_something_else_are_refused(codec, given, message):
    with pytest.raises(ValueError, match=f"^scales: {message}"):
        model().init_cache(1, 4, codec=codec, scales=given)


@pytest.mark.parametrize(
    ("codec", "given", "message"),
    [
        ("fp8_e4m3_head", layer(0.5), r"layers\[0\].k_scale: got float32\[\]; accepted: one posi"),
        ("fp8_e4m3", layer(), r"layers\[0\].k_scale: got float32\[2\]; accepted: one positive"),
        ("fp8_e4m3", layer(1, 0), r"layers\[0\].v_scale: got 0.0; accepted: one positive finite"),
        ("fp8_e4m3_head", layer([1, np.nan]), r"layers\[0\].k_scale: got nan; accepted"),
        ("fp8_e4m3_head", layer(q=np.float32([-1])), r"layers\[0\].q_scale: got -1.0; accepted"),
        (
            "int8",
            layer(),
            "codec: got 'int8', which has no scales to calibrate; accepted: fp8_e4m3",
        ),
    ],
)
def test_only_positive_finite_numbers_are_scales(codec, given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        scales(given, codec=codec)


def test_a_layer_cache_takes_only_scales_that_its_codec_has():
    sizes = {"key_dim": KEY_DIM, "value_dim": VALUE_DIM, "kv_heads": HEADS}
    given = {"k_scale": jnp.asarray(K_SCALE)}
    with pytest.raises(ValueError, match=r"^scales: got k_scale; accepted with bf16: none"):
        init_layer_cache(1, 4, **sizes, codec="bf16", scales=given)
    with pytest.raises(ValueError, match=r"^scales: got k_scale of shape \[2\]; accepted: \[\]"):
        init_layer_cache(1, 4, **sizes, codec="fp8_e4m3", scales=given)
