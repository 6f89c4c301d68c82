"""A small model whose caches are calibrated and measured, and what it really writes to them."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

from kvjax.models.family import abstract_decoder
from kvjax.nn import AttentionConfig, Decoder, DecoderConfig, MlpConfig
from kvjax.nn import attention as attention_module
from kvjax.ops import attend

VOCAB = 50


@pytest.fixture(scope="package")
def build() -> Callable[..., Decoder]:
    """A model of random weights; `k=100.0` makes the keys of all layers so many times larger."""

    def build(layers: tuple[AttentionConfig, ...], **factors: float) -> Decoder:
        rng = np.random.default_rng(1)

        def draw(leaf):
            # Norms scale by about 1.
            return rng.normal(leaf.ndim == 1, 0.2, leaf.shape).astype(np.float32)

        config = DecoderConfig(VOCAB, 32, layers, MlpConfig(48))
        model = jax.tree.map(draw, abstract_decoder(config))
        for name, factor in factors.items():
            for layer in model.layers:
                if hasattr(layer.attention, name):
                    kernel = getattr(layer.attention, name).kernel
                    kernel[...] = kernel[...] * np.float32(factor)
        return model

    return build


@pytest.fixture(scope="package")
def written() -> Callable[..., list[tuple[np.ndarray, ...]]]:
    """q (B, T, N, H) as they attend, k and v (B, T, K, ...) from an f32 cache, of each layer."""

    def written(model, tokens, count):
        queries = []

        def spy(q, *rest, **settings):
            queries.append(q)
            return attend(q, *rest, **settings)

        @jax.jit
        def run(model, cache):
            _, cache = model(tokens, cache, count=count)
            return tuple(queries), cache

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_module, "attend", spy)
            q, cache = run(model, model.init_cache(*tokens.shape, layout="dense", codec="f32"))
        assert len(q) == len(model.layers)
        return [
            (np.asarray(q[i]), *(np.moveaxis(np.asarray(held.leaves[x]), 2, 1) for x in "kv"))
            for i, held in zip(model.config.cached, cache.layers, strict=True)
        ]

    return written
