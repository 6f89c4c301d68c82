"""The decoder's own arithmetic and its contract; the families' logits are in models/test_golden."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import sizing
from kvjax.cache import Paged
from kvjax.nn import AttentionConfig, Decoder, DecoderConfig, MlpConfig, MoeConfig, NormConfig, Rope

ATTENTION = AttentionConfig(
    d_model=16, query_heads=4, kv_heads=2, key_dim=4, value_dim=4, rope=Rope(4)
)
CONFIG = DecoderConfig(
    vocab_size=11, d_model=16, attention=(ATTENTION, ATTENTION), mlp=MlpConfig(width=12)
)
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 6), np.int32)
COUNT = np.array([6, 3], np.int32)


def build(dtype=jnp.float32, **settings) -> Decoder:
    model = Decoder(replace(CONFIG, **settings), dtype=dtype, rngs=nnx.Rngs(0))
    return jax.tree.map(lambda leaf: leaf * (20 if leaf.ndim == 2 else 1), model)


@jax.jit
def forward(model, tokens, count=None):
    return model(tokens, count=count)[0]


@jax.jit
def hidden(model, tokens):
    return model.hidden(tokens)[0]


@pytest.mark.parametrize("count", [None, COUNT], ids=["all", "ragged"])
def test_last_logits_are_those_of_the_last_real_token(count):
    model = build()
    every = forward(model, TOKENS, count)
    last, _ = jax.jit(lambda model: model(TOKENS, count=count, logits="last"))(model)
    ends = COUNT - 1 if count is not None else 5
    np.testing.assert_allclose(last, every[np.arange(2), ends], atol=1e-5)


def test_logits_are_the_unembedded_hidden_states():
    model = build()
    expected = np.asarray(hidden(model, TOKENS), np.float64) @ np.asarray(model.head.kernel[...])
    np.testing.assert_allclose(forward(model, TOKENS), expected, atol=1e-4)


def test_padding_takes_no_part():
    model = build()
    other = TOKENS.copy()
    other[1, 3:] = 0
    logits, changed = forward(model, TOKENS, COUNT), forward(model, other, COUNT)
    np.testing.assert_array_equal(logits[1, :3], changed[1, :3])
    np.testing.assert_array_equal(logits[0], changed[0])
    assert np.abs(forward(model, TOKENS) - forward(model, other))[1, 3:].max() > 0.01


def test_logits_are_float32_in_every_dtype():
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        model = nnx.eval_shape(lambda dtype=dtype: build(dtype))
        assert jax.eval_shape(forward, model, TOKENS).dtype == jnp.float32


def test_a_bf16_model_is_near_its_f32_twin():
    model = build()
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)
    np.testing.assert_allclose(forward(half, TOKENS), forward(model, TOKENS), atol=0.4, rtol=0.1)


def test_tied_embeddings_have_no_head():
    model = build(tied=True)
    assert not hasattr(model, "head")
    table = np.asarray(model.embed.embedding[...], np.float64)
    np.testing.assert_allclose(forward(model, TOKENS), hidden(model, TOKENS) @ table.T, atol=1e-4)


def test_learned_positions_go_on_after_the_cached_tokens():
    model = build(max_positions=8, norm=NormConfig("layer"))
    step = jax.jit(lambda model, tokens, cache, count: model(tokens, cache, count=count))
    empty = model.init_cache(2, 8, codec="f32")
    first, cache = step(model, TOKENS[:, :3], empty, np.array([3, 1]))
    assert cache.n.tolist() == [3, 1]
    second, _ = step(model, TOKENS[:, 3:], cache, np.array([3, 0]))
    expected = forward(model, TOKENS)
    np.testing.assert_allclose(first[0], expected[0, :3], atol=1e-4)
    np.testing.assert_allclose(second[0], expected[0, 3:], atol=1e-4)


def test_logits_are_scaled_then_capped():
    plain, capped = build(), build(logit_scale=0.5, logit_cap=2.0)
    expected = 2 * np.tanh(0.5 * np.asarray(forward(plain, TOKENS), np.float64) / 2)
    np.testing.assert_allclose(forward(capped, TOKENS), expected, atol=1e-5)
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize("tied", [False, True])
def test_training_and_decoding_take_logits_from_one_place(tied):
    model = build(logit_scale=0.5, logit_cap=2.0, tied=tied)
    np.testing.assert_array_equal(
        jax.jit(lambda model: model.unembed(model.hidden(TOKENS)[0]))(model), forward(model, TOKENS)
    )


@pytest.mark.parametrize(
    ("pre_norm", "post_norm", "parallel"),
    [(True, False, False), (False, True, False), (True, True, False), (True, False, True)],
)
def test_residuals(pre_norm, post_norm, parallel):
    """One layer by hand, from the module's own parts."""
    model = build(
        pre_norm=pre_norm,
        post_norm=post_norm,
        parallel_residual=parallel,
        attention=(ATTENTION,),
    )
    layer, same = model.layers[0], lambda x: x
    names = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
    norm = {name: getattr(layer, name, same) for name in names}
    assert hasattr(layer, "attention_norm") == pre_norm
    assert hasattr(layer, "mlp_post_norm") == post_norm
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), (2, 6))
    attend = jax.jit(lambda attention, x: attention(x, positions)[0])
    x = model.embed(TOKENS)
    middle = x + norm["attention_post_norm"](attend(layer.attention, norm["attention_norm"](x)))
    mixed = norm["mlp_post_norm"](layer.mlp(norm["mlp_norm"](x if parallel else middle)))
    np.testing.assert_allclose(hidden(model, TOKENS), model.norm(middle + mixed), atol=1e-5)


def test_one_norm_may_serve_both_branches():
    model = build(parallel_residual=True, shared_norm=True, attention=(ATTENTION,))
    layer = model.layers[0]
    assert not hasattr(layer, "mlp_norm")
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), (2, 6))
    attend = jax.jit(lambda attention, x: attention(x, positions)[0])
    x = model.embed(TOKENS)
    normed = layer.attention_norm(x)
    expected = model.norm(x + attend(layer.attention, normed) + layer.mlp(normed))
    np.testing.assert_allclose(hidden(model, TOKENS), expected, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"parallel_residual": True, "pre_norm": False}], ids=str)
def test_one_norm_for_both_needs_both(settings):
    with pytest.raises(ValueError, match="shared_norm: got True; accepted: False, or True with"):
        replace(CONFIG, shared_norm=True, **settings)


def test_a_mixture_of_experts_takes_the_place_of_the_mlp():
    model = build(mlp=MoeConfig(width=12, experts=3, chosen=2))
    assert model.layers[0].mlp.experts.gate_up.kernel.shape == (3, 16, 24)
    assert np.isfinite(forward(model, TOKENS)).all()


def test_layers_may_have_feed_forward_layers_of_their_own():
    sparse, dense = MoeConfig(width=4, experts=3, chosen=2), MlpConfig(width=12)
    model = build(mlp=(dense, sparse))
    assert model.config.feed_forward == (dense, sparse)
    assert model.layers[0].mlp.up.kernel.shape == (16, 12)
    assert model.layers[1].mlp.experts.down.kernel.shape == (3, 4, 16)
    shared, each = build(), build(mlp=(dense, dense))
    np.testing.assert_array_equal(forward(shared, TOKENS), forward(each, TOKENS))


def test_as_many_feed_forward_layers_as_layers_of_attention():
    with pytest.raises(ValueError, match="mlp: got 3 entries; accepted: one for all layers, or a"):
        replace(CONFIG, mlp=(CONFIG.mlp,) * 3)


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({}, (0, 8), "batch=0: at least 1"),
        ({}, (2, 0), "capacity=0: at least 1"),
        ({}, (2, 8, "ring"), "layout='ring': the layer has no window, .*; accepted: auto, dense"),
        ({}, (2, 8, "auto", "int3"), "codec: got 'int3'; accepted: f32"),
        ({}, (2, 8, "auto", "nvfp4"), "codec='nvfp4': caches can hold f32, bf16, f16"),
        ({"max_positions": 7}, (2, 8), "capacity=8 exceeds the model's 7 learned positions"),
    ],
    ids=str,
)
def test_a_cache_that_cannot_be_is_refused(settings, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**settings).init_cache(*arguments)


def test_each_layer_has_the_slots_that_its_window_needs():
    windowed = build(attention=(ATTENTION, replace(ATTENTION, window=3)))
    assert [layer.capacity for layer in windowed.init_cache(2, 8).layers] == [8, 3]
    assert [layer.capacity for layer in windowed.init_cache(2, 8, "dense").layers] == [8, 8]


def test_a_layer_in_chunks_has_as_many_slots_as_sizing_says():
    """A ring of the chunk, or all of a shorter capacity; Llama 4's layers in small."""
    config = {"model_type": "llama4_text", "hidden_size": 16, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    spec = sizing.load(config | {"vocab_size": 11, "attention_chunk_size": 6})
    model = build(attention=tuple(replace(ATTENTION, chunk=x.chunk) for x in spec.layers))
    for capacity, slots in ((5, [5, 5, 5, 5]), (8, [6, 6, 6, 8])):
        cache = model.init_cache(2, capacity)
        assert [layer.capacity for layer in cache.layers] == slots
        assert cache.nbytes == spec.cache_bytes(capacity, 2).total


def test_layers_may_have_caches_of_their_own():
    """First and last in bf16, pages between: the bytes of each are those of its choice."""
    model = build(attention=(ATTENTION,) * 4)
    codecs, layouts = ("bf16", "int8", "int8", "bf16"), ["dense", Paged(4), "auto", "dense"]
    cache = model.init_cache(2, 8, layouts, codecs)
    spec = sizing.LayerSpec(4, 2, 4, 4)
    for layer, codec, layout in zip(cache.layers, codecs, layouts, strict=True):
        page_size = layout.page_size if isinstance(layout, Paged) else None
        said = sizing.ModelSpec("one", 16, (spec,)).cache_bytes(8, 2, codec, page_size=page_size)
        assert layer.nbytes == said.total
    logits, after = jax.eval_shape(lambda model, *step: model(*step), model, TOKENS, cache)
    assert logits.shape == (2, 6, 11)
    assert jax.tree.structure(after) == jax.tree.structure(cache)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"codec": ["bf16"]}, "codec: got 1 entries; accepted: one for all layers, or a sequence"),
        (
            {"layout": ("auto",) * 3},
            "layout: got 3 entries; .* of 2, for the layers that make keys",
        ),
        ({"codec": ["bf16", "int3"]}, "codec: got 'int3'"),
    ],
    ids=str,
)
def test_choices_that_fit_no_layers_are_refused(choices, message):
    layers = (ATTENTION, replace(ATTENTION, shares_with=0), ATTENTION)
    with pytest.raises(ValueError, match=message):
        build(attention=layers).init_cache(2, 8, **choices)


def test_a_cache_of_another_batch_is_refused():
    model = build()
    with pytest.raises(ValueError, match="tokens has 2 rows, the cache 3"):
        model(TOKENS, model.init_cache(3, 8))


def test_more_tokens_than_learned_positions_are_refused():
    with pytest.raises(ValueError, match="6 tokens exceed the model's 5 learned positions"):
        build(max_positions=5)(TOKENS)
