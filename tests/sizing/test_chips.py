"""The chip table: derived figures that others print, and a source for every chip."""

import pytest

from kvjax.sizing import CHIPS


@pytest.mark.parametrize(("name", "ridge"), [("H100-SXM", 295), ("H200", 206), ("B300", 281)])
def test_ridges(name, ridge):
    assert round(CHIPS[name].ridge) == ridge


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
