"""How budgets are spread over layers."""

import numpy as np
import pytest

from kvjax.evict import Pyramid, Uniform

TOKENS, WINDOW = 4096, 64


@pytest.mark.parametrize("layers", [2, 7, 32])
@pytest.mark.parametrize("ratio", [0.02, 0.3, 0.5, 0.686])
def test_a_pyramid_has_the_budget_for_its_mean(layers, ratio):
    """PyramidKV's own figures: S (1 - ratio) in the mean, and in equal steps down."""
    budget = round(TOKENS * (1 - ratio))
    shares = Pyramid()(layers, TOKENS, budget, WINDOW)
    assert sum(shares) == layers * budget
    high = min(2 * budget - budget / 20, TOKENS - WINDOW)
    exact = np.linspace(high, 2 * budget - high, layers)
    assert np.abs(np.array(shares) - exact).max() <= 1


def test_the_range_in_which_there_is_a_pyramid():
    """Of 4096 tokens with a window of 64, ratios 0.016 to 0.687; the last layer needs w * beta."""
    shares = {r: Pyramid()(32, TOKENS, round(TOKENS * (1 - r)), WINDOW) for r in (0.015, 0.017)}
    assert len(set(shares[0.015])) == 1
    assert len(set(shares[0.017])) > 1
    assert Pyramid()(32, TOKENS, WINDOW * 20, WINDOW)[-1] == WINDOW
    with pytest.raises(ValueError, match=r"budget: got 1279, of which the last layer gets 63\.95"):
        Pyramid()(32, TOKENS, WINDOW * 20 - 1, WINDOW)


def test_one_layer_has_all():
    assert Pyramid()(1, TOKENS, 2000, WINDOW) == (2000,)


def test_uniform():
    assert Uniform()(3, TOKENS, 100, WINDOW) == (100, 100, 100)
