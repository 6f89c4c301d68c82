"""The laws for models whose layers share keys and values, against a float64 decoder in numpy."""

from dataclasses import replace
from functools import cache
from itertools import cycle

import jax
import numpy as np
import pytest
from flax import nnx
from quick import rest_slow

from kvjax import sizing
from kvjax.cache import Kivi, Paged
from kvjax.engine import compress
from kvjax.evict import POLICIES
from kvjax.nn import (
    AttentionConfig,
    Decoder,
    DecoderConfig,
    MlpConfig,
    Rope,
    Shared,
    cla,
    last_layers,
    share,
    yoco,
)

D_MODEL, VOCAB, TOKENS, WIDTH = 16, 11, 9, 4
LENGTHS = np.array([9, 6])
TEXT = np.random.default_rng(0).integers(0, VOCAB, (2, TOKENS), np.int32)
PLAIN = AttentionConfig(
    d_model=D_MODEL, query_heads=4, kv_heads=2, key_dim=4, value_dim=4, rope=Rope(4, theta=50.0)
)
NORMED = replace(PLAIN, qk_norm="head", qkv_bias=True, value_dim=2, fused=True)
FEW, MORE = replace(PLAIN, window=3), replace(PLAIN, window=5)

# Ten layers, every fifth of them global, of which the last four share (Gemma 3n in small).
KINDS = ("few", "few", "few", "few", "all") * 2
MAPS = {
    "cla 2": share((PLAIN,) * 4, cla(4, 2)),
    "cla 3 and a tail": share((NORMED,) * 4, cla(4, 3)),
    "yoco": share((FEW, FEW, PLAIN, PLAIN), yoco(4)),
    "last layers": share(
        tuple(FEW if kind == "few" else PLAIN for kind in KINDS), last_layers(KINDS, 4)
    ),
    "spans of their own": share((FEW, MORE, replace(PLAIN, chunk=4), FEW), (0, 0, 0, 3)),
}


@cache
def build(layers: tuple[AttentionConfig, ...]) -> Decoder:
    """A model whose parameters are all drawn alike, of order 1."""
    config = DecoderConfig(VOCAB, D_MODEL, attention=layers, mlp=MlpConfig(12))
    shapes = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    leaves, treedef = jax.tree.flatten(shapes)
    rng = np.random.default_rng(1)
    drawn = [rng.normal(0, 0.5, leaf.shape).astype(np.float32) for leaf in leaves]
    return jax.tree.unflatten(treedef, drawn)


def float64(x) -> np.ndarray:
    return np.asarray(x[...], np.float64)


def through(linear, x: np.ndarray) -> np.ndarray:
    bias = 0 if linear.bias is None else float64(linear.bias)
    return x @ float64(linear.kernel) + bias


def rms(norm, x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * float64(norm.scale)


def turned(x: np.ndarray) -> np.ndarray:
    """Heads (T, N, H) rotated to positions 0 to T - 1, as complex numbers."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * 50.0 ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([z.real, z.imag], -1)


def expected_logits(model: Decoder, tokens: np.ndarray, layers=None) -> np.ndarray:
    """(T, V) of one row (T,), query by query; what is shared is handed from layer to layer."""
    x, made = float64(model.embed.embedding)[tokens], {}
    for i, layer in enumerate(model.layers):
        module, c = layer.attention, (layers or model.config.attention)[i]
        hidden = rms(layer.attention_norm, x)
        heads = (len(tokens), -1, c.key_dim)
        if c.shares_with is None:
            if c.fused:
                ends = np.cumsum(c.qkv_widths)[:2]
                q, k, v = np.split(through(module.qkv, hidden), ends, axis=-1)
            else:
                q, k, v = (through(part, hidden) for part in (module.q, module.k, module.v))
            k = k.reshape(heads)
            k = turned(rms(module.k_norm, k) if c.qk_norm else k)
            made[i] = k, v.reshape(len(tokens), -1, c.value_dim)
        else:
            q = through(module.q, hidden)
        q = q.reshape(heads)
        q = turned(rms(module.q_norm, q) if c.qk_norm else q)
        k, v = made[i if c.shares_with is None else c.shares_with]
        out = np.zeros((len(tokens), c.query_heads, c.value_dim))
        for t, head in np.ndindex(out.shape[:2]):
            first = 0 if c.window is None else max(0, t - c.window + 1)
            first = first if c.chunk is None else t - t % c.chunk
            seen, kv_head = slice(first, t + 1), head // (c.query_heads // c.kv_heads)
            weights = np.exp(k[seen, kv_head] @ q[t, head] / np.sqrt(c.key_dim))
            out[t, head] = weights @ v[seen, kv_head] / weights.sum()
        x = x + through(module.o, out.reshape(len(tokens), -1))
        hidden = rms(layer.mlp_norm, x)
        gate = through(layer.mlp.gate, hidden)
        x = x + through(layer.mlp.down, gate / (1 + np.exp(-gate)) * through(layer.mlp.up, hidden))
    return through(model.head, rms(model.norm, x))


def compiled():
    """A step of the model. It runs for so short that optimising it would take most of the time."""

    def step(model, tokens, cache, count):
        return model(tokens, cache, count=count)

    return jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})


step = compiled()


def logits_of(model: Decoder, cache, splits, run=step) -> np.ndarray:
    """(B, T, V) of TEXT, taken in steps of `splits` tokens a row; NaN past a row's length."""
    found, done, splits = np.full((2, TOKENS, VOCAB), np.nan), LENGTHS * 0, cycle(splits)
    while (done < LENGTHS).any():
        count = np.minimum(next(splits), LENGTHS - done)
        tokens = np.zeros((2, 1 if max(count) == 1 else WIDTH), np.int32)
        for row, (start, n) in enumerate(zip(done, count, strict=True)):
            tokens[row, :n] = TEXT[row, start : start + n]
        logits, cache = run(model, tokens, cache, count.astype(np.int32))
        for row, (start, n) in enumerate(zip(done, count, strict=True)):
            found[row, start : start + n] = logits[row, :n]
        done = done + count
    cache.check()
    assert cache.n.tolist() == LENGTHS.tolist()
    return found


@pytest.mark.parametrize(
    "name",
    rest_slow(MAPS, ["cla 3 and a tail", "yoco", "spans of their own"]),
)
def test_any_split_gives_the_oracle(name):
    """Law 1: forward, chunks, and token by token after a ragged chunk."""
    model = build(MAPS[name])
    want = np.stack([expected_logits(model, row) for row in TEXT])
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(step(model, TEXT, None, None)[0], want, **close)
    for row, length in enumerate(LENGTHS):
        want[row, length:] = np.nan
    for splits in ([(4, 4), (3, 2)], [(2, 4), (1, 1), (1, 1), (1, 0)]):
        empty = model.init_cache(2, TOKENS, codec="f32")
        np.testing.assert_allclose(logits_of(model, empty, splits), want, **close)


def test_the_oracle_knows_whose_keys_are_read():
    """The comparison can fail: of ten layers one reads another producer, or another window."""
    layers = MAPS["last layers"]
    model = build(layers)
    want = expected_logits(model, TEXT[0])
    for i, changes in ((7, {"shares_with": 3}), (9, {"shares_with": 5}), (8, {"window": 4})):
        changed = (*layers[:i], replace(layers[i], **changes), *layers[i + 1 :])
        assert np.abs(expected_logits(model, TEXT[0], changed) - want).max() > 0.01


def test_an_append_before_the_last_reader_shows(monkeypatch):
    """Of more than one token, readers behind the producer would miss what a ring replaces."""
    model = build(MAPS["spans of their own"])
    want = expected_logits(model, TEXT[0])

    def at_once(shared, new):
        taken = replace(shared, new=new)
        return replace(taken, cache=taken.cache.append(taken.record, taken.count))

    monkeypatch.setattr(Shared, "take", at_once)
    monkeypatch.setattr(Shared, "close", lambda shared, y: (y, shared.cache))
    empty = model.init_cache(2, TOKENS, codec="f32")
    got = logits_of(model, empty, [(4, 4)], compiled())
    assert np.abs(got[0] - want)[4:].max() > 0.01


@pytest.mark.slow
def test_what_is_evicted_is_gone_for_all_readers():
    model, codec = build(MAPS["yoco"]), "f32"
    _, cache = step(model, TEXT, model.init_cache(2, TOKENS + 1, "dense", codec), LENGTHS)
    following, one = TEXT[:, :1], np.ones(2, np.int32)
    want, _ = step(model, following, cache, one)
    for budget, same in ((TOKENS, True), (3, False)):
        after = compress(model, cache, None, POLICIES["knorm"], budget, room=1)
        assert [layer.capacity for layer in after.layers] == [budget + 1] * 3
        got, after = step(model, following, after, one)
        after.check()
        assert np.allclose(got, want, atol=1e-4) == same


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "error"),
    [("int8", 0.1), ("fp8_e4m3_token", 0.4), (Kivi(4, group=4, residual=4), 0.8)],
    ids=str,
)
@pytest.mark.parametrize("layout", ["dense", Paged(4)], ids=str)
def test_other_caches(layout, codec, error):
    """Within what the codecs lose; a wrong producer or window costs 3."""
    model = build(MAPS["yoco"])
    want = np.stack([expected_logits(model, row) for row in TEXT])
    splits = [(4, 4), (1, 1), (1, 1), (1, 1)]
    got = logits_of(model, model.init_cache(2, TOKENS, layout, codec), splits)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(got[row, :length], want[row, :length], atol=error)


def spec_of(layers) -> sizing.ModelSpec:
    """What sizing is told of the same layers."""
    kept = ("query_heads", "kv_heads", "key_dim", "value_dim", "window", "chunk", "shares_with")
    specs = tuple(
        sizing.LayerSpec(**{name: getattr(layer, name) for name in kept}) for layer in layers
    )
    return sizing.ModelSpec("shared", D_MODEL, specs)


def bytes_of(layers, batch, capacity, codec) -> int:
    config = DecoderConfig(VOCAB, D_MODEL, attention=tuple(layers), mlp=MlpConfig(12))
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    cache = jax.eval_shape(lambda: model.init_cache(batch, capacity, codec=codec))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


@pytest.mark.parametrize("name", [name for name in MAPS if name != "spans of their own"])
def test_the_formula_is_the_array(name):
    """Law 2: bytes of the producers, and of nothing else."""
    for batch, capacity, codec in ((1, 1, "f32"), (3, 7, "bf16"), (2, 64, "int8")):
        said = spec_of(MAPS[name]).cache_bytes(capacity, batch, codec).total
        assert bytes_of(MAPS[name], batch, capacity, codec) == said


def test_a_ring_is_as_long_as_its_widest_reader_needs():
    layers = MAPS["spans of their own"]
    model = build(layers)
    assert [layer.capacity for layer in model.init_cache(1, 64).layers] == [5, 3]
    widest = (MORE, replace(FEW, shares_with=None))
    assert bytes_of(layers, 1, 64, "f32") == spec_of(widest).cache_bytes(64, 1, "f32").total
    seeing_all = build(share((FEW, PLAIN), (0, 0)))
    assert seeing_all.init_cache(1, 64).layers[0].capacity == 64
    with pytest.raises(ValueError, match=r"or one that shares its cache has none; accepted: auto"):
        seeing_all.init_cache(1, 64, "ring")


def test_parameters_are_those_of_the_formula():
    """A shared layer has no projections of keys and values, and no norm of keys."""
    for layers in (MAPS["cla 2"], MAPS["last layers"]):
        attentions = [layer.attention for layer in build(layers).layers]
        kernels = [x for module in attentions for x in jax.tree.leaves(module) if x.ndim == 2]
        assert sum(x.size for x in kernels) == spec_of(layers).attention_parameters
    shared = build(MAPS["cla 3 and a tail"]).layers[1].attention
    assert not {"qkv", "k", "v", "k_norm"} & set(vars(shared))


# Bytes a token in bf16 of the 1B models of Brandon et al. 2024 (arXiv:2405.12981, table 1), which
# have 20 layers: KV heads, H, the map, bytes.
KEEP_ENDS = (0, *(i - (i - 1) % 2 for i in range(1, 19)), 19)
PUBLISHED = [
    (1, 128, cla(20, 1), 10240),
    (1, 128, cla(20, 2), 5120),
    (1, 90, cla(20, 2), 3600),
    (1, 64, cla(20, 2), 2560),
    (4, 128, cla(20, 2), 20480),
    (2, 128, cla(20, 2), 10240),
    (1, 128, cla(20, 3), 3584),
    (1, 128, cla(20, 4), 2560),
    (1, 128, KEEP_ENDS, 5632),
]


@pytest.mark.parametrize(("kv_heads", "dim", "producers", "published"), PUBLISHED)
def test_bytes_a_token_that_were_published(kv_heads, dim, producers, published):
    layer = AttentionConfig(D_MODEL, 16, kv_heads, key_dim=dim, value_dim=dim)
    layers = share((layer,) * 20, producers)
    assert spec_of(layers).bytes_per_token("bf16") == published
    tables = len(set(producers)) * 5  # a length and a flag each
    assert bytes_of(layers, 1, 8, "bf16") == 8 * published + tables


def test_the_map_of_gemma3n_is_that_of_its_config():
    """As sizing reads it, of which the bytes were measured on transformers' caches."""
    config = {"model_type": "gemma3n_text", "hidden_size": 2048, "intermediate_size": 16384}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}
    config |= {"num_hidden_layers": 35, "num_kv_shared_layers": 15, "vocab_size": 262400}
    spec = sizing.load(config)
    producers = last_layers([layer.window for layer in spec.layers], 15)
    said = tuple(i if x.shares_with is None else x.shares_with for i, x in enumerate(spec.layers))
    assert producers == said
    assert set(producers[20:]) == {18, 19}
