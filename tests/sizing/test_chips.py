"""The chip table: derived figures that others print, and a source for every chip."""

import pytest

from kvjax.sizing import CHIPS


@pytest.mark.parametrize(("name", "ridge"), [("H100-SXM", 295), ("H200", 206), ("B300", 281)])
def test_ridges(name, ridge):
    assert round(CHIPS[name].ridge) == ridge


@pytest.mark.parametrize(
    ("name", "terascale"),
    [
        ("H100-SXM", 3.9),  # FlashAttention-3 (Shah et al. 2024), section 3.2
        ("B200", 5.0),  # NVIDIA, 'Inside NVIDIA Blackwell Ultra'
        ("B300", 10.7),  # the same
    ],
)
def test_published_exponentials_per_second(name, terascale):
    assert round(CHIPS[name].exponentials_per_second / 1e12, 1) == terascale


@pytest.mark.parametrize(
    ("name", "lanes", "boost_hz"),
    [
        ("A100-80", 108 * 64, 1.41e9),
        ("H100-SXM", 132 * 128, 1.98e9),
        ("H100-PCIe", 114 * 128, 1.755e9),
    ],
)
def test_vector_rates_are_two_flop_a_lane_and_clock(name, lanes, boost_hz):
    """NVIDIA's whitepapers: f32 lanes of all multiprocessors and the boost clock of f32 work."""
    assert CHIPS[name].vector_flops == pytest.approx(2 * lanes * boost_hz, rel=0.01)


def test_what_makers_do_not_print_is_not_there():
    unknown = {name for name in CHIPS if CHIPS[name].exponentials_per_second is None}
    assert unknown == {name for name in CHIPS if name.startswith("TPU")} | {"MI300X"}
    without_vector = {name for name in CHIPS if CHIPS[name].vector_flops is None}
    assert without_vector == {name for name in CHIPS if name.startswith("TPU")}
    assert all(CHIPS[name].vector_ridge is None for name in without_vector)


@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_has_plausible_figures_and_a_source(name):
    chip = CHIPS[name]
    assert chip.name == name
    assert len(chip.source) > 10
    assert 15e9 < chip.memory_bytes < 300e9
    assert 0.5e12 < chip.bytes_per_second < 10e12
    # Outside this band a unit is wrong, or a sparse rate was taken for a dense one.
    assert 150 < chip.ridge < 570
    assert chip.fp8_flops is None or chip.bf16_flops <= chip.fp8_flops <= 2.01 * chip.bf16_flops
    # f32 lanes do 1/6 to 1/40 of the matrix rate, special functions 1/5 to 1/20 of theirs.
    if chip.vector_flops is not None:
        assert 6 < chip.bf16_flops / chip.vector_flops < 40
        if chip.exponentials_per_second is not None:
            assert 5 < chip.vector_flops / chip.exponentials_per_second < 20
