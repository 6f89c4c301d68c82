"""Scales of 8-bit float caches: one for a layer's tensor, or one for each of its KV heads.

scale = amax / the largest finite number of the format, amax being the largest |x|, or nearly so,
that calibration saw; x is stored as x / scale. Files of them are `kvjax.models.cache_scales`'.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax import sizing
from kvjax.cache.codecs import StaticFp8, codecs
from kvjax.cache.kivi_codec import Kivi


@dataclass(frozen=True, eq=False)
class LayerScales:
    """Scales of one layer; float32, positive and finite.

    Attributes:
      k_scale, v_scale: () or (K,), as the codec has them, K that of keys or of values.
      q_scale: (N,), one a query head, or None. For products that run in 8 bits: with queries stored
        as q / q_scale, scores are the product of codes times q_scale * k_scale. No cache uses it.
    """

    k_scale: np.ndarray
    v_scale: np.ndarray
    q_scale: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Scales:
    """Scales of a whole model.

    Attributes:
      codec: fp8_e4m3, fp8_e5m2 or fp8_e4m3_head, for whose caches they are.
      layers: one entry a layer; None where a layer keeps no keys and values of its own.
      source: what they were calibrated on.
      tokens: how many tokens of that were seen.
      percentile: of the tokens' amax, at which scales were set; None for the largest of all.

    Raises:
      ValueError: for a codec without such scales, or scales that are not positive finite numbers of
        its shape.
    """

    codec: str
    layers: tuple[LayerScales | None, ...]
    source: str
    tokens: int
    percentile: float | None = None

    def __post_init__(self) -> None:
        per_head = static_codec(self.codec).per_head
        for i, layer in enumerate(self.layers):
            if layer is not None:
                _check(f"layers[{i}].k_scale", layer.k_scale, per_head)
                _check(f"layers[{i}].v_scale", layer.v_scale, per_head)
                if layer.q_scale is not None:
                    _check(f"layers[{i}].q_scale", layer.q_scale, True)

    def of_layer(
        self, i: int, codec: str | Kivi, kv_heads: int, value_heads: int | None = None
    ) -> dict[str, Array] | None:
        """Fresh arrays, which may be donated, for a cache of layer i; None for other codecs.

        `value_heads`: None where values have as many heads as keys.

        Raises:
          ValueError: for a codec with scales of another format or shape, or a layer without any.
        """
        name = sizing.codec(codec).name if isinstance(codec, str) else codec.name
        if name not in STATIC:
            return None
        if name != static_codec(self.codec).name:
            raise ValueError(f"scales: got those of {self.codec}; accepted: of codec {name}")
        layer = self.layers[i] if i < len(self.layers) else None
        if layer is None:
            raise ValueError(f"scales: got none for layer {i}; accepted: for each layer in {name}")
        given = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        heads = {"k_scale": kv_heads, "v_scale": kv_heads if value_heads is None else value_heads}
        for array, scale in given.items():
            if scale.shape not in ((), (heads[array],)):
                raise ValueError(
                    f"scales: got {scale.size} of {array} for layer {i}; accepted: one for each of "
                    f"its {heads[array]} heads"
                )
        return {array: jnp.array(scale) for array, scale in given.items()}


# Codecs whose scales are constants of a cache, by name.
STATIC = {name: codec for name, codec in codecs().items() if isinstance(codec, StaticFp8)}


def static_codec(name: str) -> StaticFp8:
    """The codec of that name, whose scales calibration sets; ValueError for any other."""
    codec = STATIC.get(sizing.codec(name).name)
    if codec is None:
        raise ValueError(
            f"codec: got {name!r}, which has no scales to calibrate; accepted: {', '.join(STATIC)} "
            f"(fp8_e4m3_token and int8 scale each token as it is written, from its own numbers)"
        )
    return codec


def _check(name: str, scale: np.ndarray, per_head: bool) -> None:
    wanted = "one positive finite number" + (" a head" if per_head else "")
    if scale.dtype != np.float32 or scale.ndim != per_head or not scale.size:
        raise ValueError(f"{name}: got {scale.dtype}{list(scale.shape)}; accepted: {wanted}")
    bad = scale[~(np.isfinite(scale) & (scale > 0))]
    if bad.size:
        raise ValueError(f"{name}: got {float(bad.flat[0])}; accepted: {wanted}")
