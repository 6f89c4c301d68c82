"""Bytes of encoded records, counted by hand or printed by the codec's authors."""

from fractions import Fraction

import pytest

from kvjax.sizing import CODECS, CodecSpec, Kivi, LayerSpec, ModelSpec, Part, Scaled, Tiled

PLAIN = ModelSpec("test", 64, (LayerSpec(4, 2, 6, 10),) * 3)
MLA = ModelSpec(
    "test", 64, (LayerSpec(128, 1, 192, 128, kind="latent", latent_rank=512, rope_dim=64),) * 61
)


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("f32", 2 * (6 + 10) * 4),
        ("bf16", 2 * (6 + 10) * 2),
        ("fp8_e4m3", 2 * (6 + 10)),
        ("fp8_e4m3_head", 2 * (6 + 10)),
        # An f32 scale for each head and token, of K and of V.
        ("fp8_e4m3_token", 2 * (6 + 10 + 4 + 4)),
        ("int8", 2 * (6 + 10 + 4 + 4)),
        # An fp16 scale for 32 channels of each head and token.
        ("int4", 2 * (3 + 5 + 2 + 2)),
    ],
)
def test_bytes_of_a_token(name, per_token):
    assert PLAIN.bytes_per_token(name) == 3 * per_token
    assert PLAIN.cache_bytes(7, 2, name).allocated == 7 * 2 * 3 * per_token


@pytest.mark.parametrize(
    ("name", "scales"), [("fp8_e4m3", 2 * 4), ("fp8_e5m2", 2 * 4), ("fp8_e4m3_head", 2 * 2 * 4)]
)
def test_scales_that_do_not_grow_are_kept_once_a_layer(name, scales):
    for batch in (1, 5):
        assert PLAIN.cache_bytes(7, batch, name).tables == 3 * (5 * batch + scales)
    assert PLAIN.cache_bytes(7, 1, "bf16").tables == 3 * 5


def test_odd_widths_of_four_bits_round_up_in_each_row():
    """An odd number of 4-bit codes ends in half a byte."""
    assert CODECS["int4"].live(3, Part(2, 5, key=True)) == 3 * 2 * (3 + 2)
    assert CODECS["int4"].live(3, Part(2, 65, key=True)) == 3 * 2 * (33 + 3 * 2)


def test_tiles_of_flash_mla_and_nvfp4():
    """656 bytes: 512 codes, 4 f32 scales, 64 rope dims in bf16. 352: 4 bits, fp8 scales of 16."""
    assert MLA.bytes_per_token("fp8_ds_mla") == 61 * 656
    assert MLA.bytes_per_token("nvfp4") == 61 * 352


def test_kivi_against_a_count_of_its_buffers():
    """Streams tokens through KIVI's own rule (Liu et al. 2024, algorithm 1), counting bits."""
    codec, width = CODECS["kivi2"], 64
    key, value = Part(1, width, key=True), Part(1, width, key=False)
    encoded_keys = exact_keys = encoded_values = exact_values = 0
    bits = 2 + 2 * 16 / 32  # codes, and an fp16 scale and zero for 32 of them
    for tokens in range(1, 700):
        exact_keys += 1
        if exact_keys == 128:
            encoded_keys, exact_keys = encoded_keys + 128, 0
        exact_values += 1
        if exact_values > 128:
            encoded_values, exact_values = encoded_values + 1, 128
        assert codec.live(tokens, key) == (encoded_keys * bits / 8 + exact_keys * 2) * width
        assert codec.live(tokens, value) == (encoded_values * bits / 8 + exact_values * 2) * width
        assert codec.live(tokens, key) <= codec.read(tokens, key) <= codec.allocated(tokens, key)


def test_a_residual_window_is_allocated_whole():
    assert CODECS["kivi4"].allocated(1, Part(2, 64, key=True)) == 128 * 2 * 64 * 2
    assert CODECS["kivi4"].allocated(0, Part(2, 64, key=True)) == 0


def test_codecs_of_ones_own():
    assert Kivi("mine", 2, group=64, residual=64).per_token(Part(1, 64, True)) == Fraction(20)
    assert Scaled("mine", 8, "head").constants(Part(3, 8, True)) == 12
    assert Tiled("mine", 8, tile=32, scale_bytes=1).per_token(Part(1, 64, True)) == 64 + 2
    assert Tiled("mine", 8, rope_bits=16).per_token(Part(1, 64, True, rope=True)) == 128
    assert Tiled("mine", 8).per_token(Part(1, 64, True, rope=True)) == 64 + 4
    assert CodecSpec("mine", 4).per_token(Part(1, 5, True)) == 3
    with pytest.raises(ValueError, match="codec: got 'mine' of 4 bits; accepted: whole bytes"):
        _ = CodecSpec("mine", 4).itemsize


def test_states_are_not_encoded():
    """They are as wide as activations: 4 bytes beside an f32 cache, otherwise 2."""
    assert {name: spec.activation_itemsize for name, spec in CODECS.items()} == {
        name: 4 if name == "f32" else 2 for name in CODECS
    }
