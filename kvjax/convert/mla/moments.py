"""Second moments of what each layer's attention is given, from running the source on tokens."""

from __future__ import annotations

import jax
import numpy as np

from kvjax.convert.compare import Progress, no_progress
from kvjax.nn import Decoder
from kvjax.nn.watch import attention_inputs


def second_moments(
    model: Decoder, windows: np.ndarray, on_progress: Progress = no_progress
) -> list[np.ndarray]:
    """The mean of (x, 1) (x, 1)^T over tokens, of each layer: (D + 1, D + 1), summed in float64.

    Args:
      model: the source, in float32.
      windows: (count, T) token ids, each window read on its own.
      on_progress: called with "calibrating", windows done and all of them.
    """
    inputs = jax.jit(attention_inputs)
    width = model.config.d_model + 1
    moments = [np.zeros((width, width)) for _ in model.config.attention]
    for done, window in enumerate(windows, start=1):
        for moment, x in zip(moments, inputs(model, window[None]), strict=True):
            with_one = np.pad(np.asarray(x[0], np.float64), ((0, 0), (0, 1)), constant_values=1)
            moment += with_one.T @ with_one / windows.size
        on_progress("calibrating", done, len(windows))
    return moments
