"""Moments of what attention is given."""

import numpy as np

from kvjax import models
from kvjax.convert.mla.moments import second_moments


def test_moments_of_what_the_layers_are_given(golden):
    """Of the first layer, its normed embeddings; with a constant 1 beside them."""
    model = models.load(golden / "llama_bias", "f32")
    windows = np.random.default_rng(0).integers(0, 96, (3, 12), np.int32)
    seen = []
    first, second = second_moments(model, windows, lambda *stage: seen.append(stage))
    x = np.asarray(model.embed(windows), np.float64).reshape(36, -1)
    x /= np.sqrt(np.square(x).mean(axis=1, keepdims=True) + model.config.norm.eps)
    x = np.append(x * np.asarray(model.layers[0].attention_norm.scale), np.ones((36, 1)), axis=1)
    np.testing.assert_allclose(first, x.T @ x / 36, rtol=1e-5, atol=1e-6)
    assert second.shape == first.shape
    assert np.abs(second - first).max() > 0.1
    assert second[-1, -1] == 1
    assert seen == [("calibrating", done, 3) for done in (1, 2, 3)]
