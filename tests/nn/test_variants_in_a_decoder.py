"""Decoders of attention that keeps no keys and values of heads, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quick import rest_slow

from kvjax.cache import Paged
from kvjax.nn import (
    AttentionConfig,
    Decoder,
    DecoderConfig,
    LatentAttentionConfig,
    MlpConfig,
    Rope,
    TensorProductAttentionConfig,
    TiedAttentionConfig,
    share,
)
from kvjax.nn.watch import attention_modules

D_MODEL, VOCAB, TOKENS = 16, 11, 7
PLAIN = AttentionConfig(D_MODEL, 4, 2, 8, 8, rope=Rope(8))
VARIANTS = {
    "latent": LatentAttentionConfig(D_MODEL, 4, 12, 4, 8, 8, rope=Rope(4)),
    "several latents": LatentAttentionConfig(D_MODEL, 4, 8, 4, 8, 8, rope=Rope(4), latents=2),
    "tied": TiedAttentionConfig(D_MODEL, 4, 2, 8, Rope(4), window=5),
    "factors": TensorProductAttentionConfig(D_MODEL, 4, 8, 2, 2, 3, rope=Rope(8)),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
# Golden models have one latent, and ties are read as several latents are.
few_variants = pytest.mark.parametrize(
    "variant",
    rest_slow(VARIANTS, ["several latents", "factors"]),
)
step = jax.jit(lambda model, tokens, cache, count: model(tokens, cache, count=count))


def decoder(*attention) -> Decoder:
    config = DecoderConfig(VOCAB, D_MODEL, attention, MlpConfig(24))
    return Decoder(config, rngs=nnx.Rngs(0))


@few_variants
def test_a_decoder_of_it_decodes_what_it_scores(variant):
    """Beside a layer of heads, of ragged rows, over pages."""
    model = decoder(VARIANTS[variant], PLAIN)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, TOKENS), np.int32)
    want, _ = step(model, tokens, None, None)
    empty = model.init_cache(2, TOKENS, [Paged(2), "auto"], "f32")
    first, cache = step(model, tokens[:, :5], empty, np.int32([5, 3]))
    np.testing.assert_allclose(first[0], want[0, :5], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(first[1, :3], want[1, :3], rtol=1e-5, atol=1e-5)
    for _ in range(2):
        at = cache.n
        next_tokens = np.take_along_axis(tokens, np.asarray(at)[:, None], axis=1)
        logits, cache = step(model, next_tokens, cache, np.int32([1, 1]))
        for row, position in enumerate(at.tolist()):
            np.testing.assert_allclose(logits[row, 0], want[row, position], rtol=1e-5, atol=1e-5)
    cache.check()


@few_variants
def test_it_learns(variant):
    """Gradients reach all parameters."""
    model = decoder(VARIANTS[variant])
    tokens = jnp.arange(2 * TOKENS).reshape(2, TOKENS) % VOCAB
    grads = jax.jit(jax.grad(lambda model: jnp.square(model(tokens)[0]).sum()))(model)
    assert all(jnp.isfinite(x).all() and jnp.abs(x).max() > 0 for x in jax.tree.leaves(grads))


@every_variant
def test_no_other_layer_reads_what_it_keeps(variant):
    kind = type(VARIANTS[variant]).__name__
    with pytest.raises(ValueError, match=rf"^attention\[0\]: got {kind}; accepted: AttentionConf"):
        share((VARIANTS[variant], PLAIN), (0, 0))
    with pytest.raises(ValueError, match=rf"^attention\[1\]: got {kind}; accepted: AttentionConf"):
        share((PLAIN, VARIANTS[variant]), (0, 1))
    reader = AttentionConfig(D_MODEL, 4, 2, 8, 8, rope=Rope(8), shares_with=0)
    message = rf"^attention\[1\].shares_with: got 0, a layer of {kind}; accepted: one of Attention"
    with pytest.raises(ValueError, match=message):
        decoder(VARIANTS[variant], reader)


@every_variant
def test_what_watches_keys_of_heads_refuses_it(variant):
    with pytest.raises(ValueError, match=r"^layers\[1\].attention: got .*; accepted: Attention"):
        attention_modules(decoder(PLAIN, VARIANTS[variant]))
