"""Every family and setting against transformers' logits, on every way through the model.

The models and logits in tests/golden are written by scripts/make_golden.py, which shares no code
with kvjax.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path

import jax
import numpy as np
import pytest
from quick import rest_slow

from kvjax import models
from kvjax.engine import decode, prefill
from kvjax.models.family import abstract_decoder
from kvjax.models.registry import FAMILIES, read_decoder
from kvjax.models.tensor_layout import (
    GROUPED_BY_KV_HEAD,
    KEYS_UP,
    PAIRS_AFTER_LATENT,
    PAIRS_IN_HEADS,
    PAIRS_IN_QUERIES,
    SAME,
    TRANSPOSED,
)
from kvjax.nn import (
    Decoder,
    DecoderConfig,
    Gated,
    Groups,
    MlpConfig,
    MoeConfig,
    NormConfig,
    Router,
)

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/ref.npz"))
CONFIGS = {name: json.loads((GOLDEN / name / "config.json").read_text()) for name in NAMES}
WINDOWED = [
    name
    for name in NAMES
    if any(layer.window is not None for layer in read_decoder(CONFIGS[name])[1].attention)
]
# With a cache, one model of each family by default, with windows where it has them, and those whose
# positions are unlike theirs.
DEFAULT = {
    *{CONFIGS[name]["model_type"]: name for name in (*NAMES[::-1], *WINDOWED[::-1])}.values(),
    *("llama_mha", "llama_yarn", "gpt2_conv1d"),
}
LATENT = [name for name in NAMES if name.startswith(("deepseek", "minicpm3"))]
# A layer with a window has a ring where the layout is "auto".
DENSE = ("gemma3_pattern", "gpt_oss_window")
CASES = [
    (name, layout)
    for name in NAMES
    for layout in (("auto", "dense") if name in WINDOWED else ("auto",))
]
CACHED = rest_slow(
    CASES, [case for case in CASES if case[0] in (DEFAULT if case[1] == "auto" else DENSE)]
)
# Whole prompts are one more way through the same layers: of each kind of layer one.
PROMPTED = rest_slow(
    CASES,
    [
        *(("llama_mha", "auto"), ("gpt2_conv1d", "auto"), ("gemma3_pattern", "dense")),
        *(("deepseek_v3_groups", "auto"), ("gpt_oss_window", "auto")),
    ],
)
TOLERANCE = 2e-4
WIDTH = 8  # of chunks: one compiled step serves every split, by the count of real tokens


@cache
def read(name: str) -> tuple[Decoder, np.ndarray, np.ndarray]:
    """The model in f32, its input ids (B, T) and transformers' logits (B, T, V)."""
    reference = np.load(GOLDEN / name / "ref.npz")
    return models.load(GOLDEN / name, dtype="f32"), reference["input_ids"], reference["logits"]


def difference(logits: np.ndarray, expected: np.ndarray) -> float:
    assert logits.shape == expected.shape
    return float(np.abs(logits - expected).max())


@jax.jit
def forward(model: Decoder, tokens: np.ndarray) -> jax.Array:
    return model(tokens)[0]


def decode_in_chunks(
    model: Decoder,
    tokens: np.ndarray,
    lengths: np.ndarray,
    widths: Iterator[np.ndarray],
    layout: str,
) -> np.ndarray:
    """Logits (B, T, V) of the rows' first lengths (B,) tokens, `widths` (B,) of them at a time."""
    cache = model.init_cache(*tokens.shape, layout, codec="f32")
    logits = np.zeros((*tokens.shape, model.config.vocab_size), np.float32)
    done = np.zeros_like(lengths)
    while (done < lengths).any():
        count = np.minimum(next(widths), lengths - done)
        width = 1 if count.max() == 1 else WIDTH
        chunk = np.full((len(tokens), width), 7, np.int32)  # padding that is a token like others
        for row, (start, n) in enumerate(zip(done, count, strict=True)):
            chunk[row, :n] = tokens[row, start : start + n]
        new, cache = decode(model, chunk, cache, count)
        for row, (start, n) in enumerate(zip(done, count, strict=True)):
            logits[row, start : start + n] = new[row, :n]
        done += count
    cache.check()
    assert cache.n.tolist() == lengths.tolist()
    return logits


@pytest.mark.parametrize("name", NAMES)
def test_forward(name):
    model, tokens, expected = read(name)
    assert difference(forward(model, tokens), expected) <= TOLERANCE


@pytest.mark.parametrize("widths", [(8,), (1,), (3, 8, 1, 5)], ids=str)
@pytest.mark.parametrize(("name", "layout"), CACHED)
def test_chunks(name, layout, widths):
    model, tokens, expected = read(name)
    rows, length = tokens.shape
    chunks = (np.full(rows, width, np.int32) for width in cycle(widths))
    logits = decode_in_chunks(model, tokens, np.full(rows, length, np.int32), chunks, layout)
    assert difference(logits, expected) <= TOLERANCE


@pytest.mark.parametrize(("name", "layout"), CACHED)
def test_ragged_rows(name, layout):
    """Rows of different lengths that take, and rest for, different numbers of tokens a step."""
    model, tokens, expected = read(name)
    lengths = np.array([tokens.shape[1], 13], np.int32)
    widths = cycle(np.array(row, np.int32) for row in [(8, 5), (2, 0), (1, 1), (0, 7)])
    logits = decode_in_chunks(model, tokens, lengths, widths, layout)
    for row, length in enumerate(lengths):
        assert difference(logits[row, :length], expected[row, :length]) <= TOLERANCE


@pytest.mark.parametrize(("name", "layout"), PROMPTED)
def test_ragged_prompts(name, layout):
    """Right-padded prompts at once: `prefill` gives the logits after each row's own last token."""
    model, tokens, expected = read(name)
    lengths = np.array([9, tokens.shape[1]], np.int32)
    padded = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 7)
    empty = model.init_cache(*tokens.shape, layout, codec="f32")
    logits, cache = prefill(model, padded, empty, lengths)
    assert difference(logits, expected[range(2), lengths - 1]) <= TOLERANCE
    assert cache.n.tolist() == lengths.tolist()


@pytest.mark.parametrize("name", WINDOWED)
def test_prompts_are_several_windows_long_and_rings_one(name):
    model, tokens, _ = read(name)
    layers = model.init_cache(*tokens.shape).layers
    for attention, layer in zip(model.config.attention, layers, strict=True):
        assert layer.capacity == (attention.window or tokens.shape[1])
        assert attention.window is None or 3 * attention.window <= tokens.shape[1]


@pytest.mark.parametrize("width", range(1, 9))
def test_decode_of_1_to_8_tokens(width):
    model, tokens, expected = read("llama_mha")
    cache = model.init_cache(*tokens.shape, codec="f32")
    for start in range(0, tokens.shape[1] - width + 1, width):
        chunk = tokens[:, start : start + width]
        logits, cache = decode(model, chunk, cache, np.full(len(tokens), width, np.int32))
        assert difference(logits, expected[:, start : start + width]) <= TOLERANCE


@pytest.mark.parametrize(
    "name",
    rest_slow(LATENT, [name for name in LATENT if name in DEFAULT]),
)
def test_absorbed_latent_attention_is_the_expanded_one(name):
    """A forward pass makes keys and values of heads; one token at a time reads latents alone."""
    model, tokens, expected = read(name)
    rows, length = tokens.shape
    by_token = (np.ones(rows, np.int32) for _ in range(length))
    absorbed = decode_in_chunks(model, tokens, np.full(rows, length), by_token, "auto")
    expanded, limit = forward(model, tokens), 1e-5 * np.abs(expected).max()
    assert difference(absorbed, expanded) <= limit
    assert difference(absorbed, expected) <= limit


class Swapped:
    """Stored as two halves in the other order."""

    def shape(self, shape, attention):
        return shape[::-1]

    def read(self, stored, attention):
        return np.concatenate(np.split(stored, 2)[::-1]).T


class Reversed:
    """Stored with its heads in the other order."""

    def shape(self, shape, attention):
        return shape[::-1]

    def read(self, stored, attention):
        heads = stored.reshape(-1, attention.key_dim, *stored.shape[1:])
        return heads[::-1].reshape(stored.shape).T


class KeysLast:
    """Ways up of each head stored with those to its values before those to its keys."""

    def shape(self, shape, attention):
        return KEYS_UP.shape(shape, attention)

    def read(self, stored, attention):
        by_head = stored.reshape(attention.query_heads, -1, stored.shape[-1])
        return by_head[:, -attention.head_dim :]


MISREAD = {
    "neox q, k, v concatenated": (
        "gpt_neox_interleaved",
        {"attention.qkv.kernel": TRANSPOSED, "attention.qkv.bias": SAME},
    ),
    "gpt2 c_proj transposed": ("gpt2_conv1d", {"attention.o.kernel": TRANSPOSED}),
    "gpt2 mlp transposed": ("gpt2_conv1d", {"mlp.down.kernel": TRANSPOSED}),
    "phi3 q, k, v grouped": ("phi3_fused", {"attention.qkv.kernel": GROUPED_BY_KV_HEAD}),
    "phi3 up before gate": ("phi3_fused", {"mlp.gate_up.kernel": Swapped()}),
    "llama KV heads in reverse": ("llama_mha", {"attention.k.kernel": Reversed()}),
    "cohere2 halves for pairs": (
        "cohere2_pattern",
        {"attention.q.kernel": TRANSPOSED, "attention.k.kernel": TRANSPOSED},
    ),
    "cohere2 pairs in values": ("cohere2_pattern", {"attention.v.kernel": PAIRS_IN_HEADS}),
    "deepseek halves for pairs": (
        "deepseek_v2_groups",
        {"attention.q_up.kernel": TRANSPOSED, "attention.kv_down.kernel": TRANSPOSED},
    ),
    "deepseek queries rotated in halves": (
        "deepseek_v2_lite",
        {"attention.q.kernel": TRANSPOSED},
    ),
    "deepseek pairs in biases, too": ("deepseek_v2_groups", {"attention.kv_down.bias": SAME}),
    "deepseek values before keys": ("deepseek_v3_groups", {"attention.k_up": KeysLast()}),
    "minicpm3 pairs for halves": (
        "minicpm3_longrope",
        {
            "attention.q_up.kernel": PAIRS_IN_QUERIES,
            "attention.kv_down.kernel": PAIRS_AFTER_LATENT,
        },
    ),
    "gpt-oss gates before ups": ("gpt_oss_window", {"mlp.experts.gate_up.kernel": SAME}),
    "gpt-oss biases, too": ("gpt_oss_window", {"mlp.experts.gate_up.bias": SAME}),
    "llama V from K's heads": ("llama_gqa_tied", {"attention.v.kernel": Reversed()}),
}


@pytest.mark.parametrize(("name", "layouts"), MISREAD.values(), ids=MISREAD)
def test_a_misread_layout_shows(name, layouts, monkeypatch):
    """The comparison above can fail: the same tensors, in a layout of the same shape."""
    model, tokens, expected = read(name)
    family = FAMILIES[json.loads(model.config.source)["model_type"]]
    wrong = {f"layers.{{i}}.{path}": layout for path, layout in layouts.items()}
    assert wrong.keys() <= {row.path for row in family.tensors}
    tensors = tuple(replace(row, layout=wrong.get(row.path, row.layout)) for row in family.tensors)
    monkeypatch.setitem(FAMILIES, family.model_type, replace(family, tensors=tensors))
    misread = models.load(GOLDEN / name, dtype="f32")
    assert difference(forward(misread, tokens), expected) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["mixtral_gqa", "qwen3_moe_dense_between"])
def test_a_gate_for_a_way_up_shows(name, monkeypatch):
    model, tokens, expected = read(name)
    family = FAMILIES[json.loads(model.config.source)["model_type"]]
    tensors = tuple(
        row if row.half is None else replace(row, half=1 - row.half) for row in family.tensors
    )
    monkeypatch.setitem(FAMILIES, family.model_type, replace(family, tensors=tensors))
    misread = models.load(GOLDEN / name, dtype="f32")
    assert difference(forward(misread, tokens), expected) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["mixtral_gqa", "qwen3_moe_dense_between"])
def test_experts_in_another_order_show(name):
    _, tokens, expected = read(name)
    shuffled = models.load(GOLDEN / name, dtype="f32")
    down = shuffled.layers[0].mlp.experts.down.kernel
    down[...] = down[...][::-1]
    assert difference(forward(shuffled, tokens), expected) > 10 * TOLERANCE


def in_attention(**changes) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: replace(
        config, attention=tuple(replace(layer, **changes) for layer in config.attention)
    )


def with_rope(**changes) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: in_attention(rope=replace(config.attention[0].rope, **changes))(config)


def in_layers(change) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: replace(config, attention=tuple(map(change, config.attention)))


def in_gate(**changes) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: in_mlp(gate=replace(config.mlp.gate, **changes))(config)


def in_norm(**changes) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: replace(config, norm=replace(config.norm, **changes))


def in_mlp(**changes) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: replace(config, mlp=replace(config.mlp, **changes))


def in_moe(**changes) -> Callable[[DecoderConfig], DecoderConfig]:
    def change(mlp: MlpConfig | MoeConfig) -> MlpConfig | MoeConfig:
        return replace(mlp, **changes) if isinstance(mlp, MoeConfig) else mlp

    return lambda config: replace(config, mlp=tuple(map(change, config.feed_forward)))


def in_router(**changes) -> Callable[[DecoderConfig], DecoderConfig]:
    def change(mlp: MlpConfig | MoeConfig) -> MlpConfig | MoeConfig:
        if not isinstance(mlp, MoeConfig):
            return mlp
        return replace(mlp, router=replace(mlp.router, **changes))

    return lambda config: replace(config, mlp=tuple(map(change, config.feed_forward)))


def without_eps_of_qk(config: DecoderConfig) -> DecoderConfig:
    return in_attention(norm=replace(config.attention[0].norm, eps=1e-6))(config)


MISSET = {
    "no rope": ("llama_mha", in_attention(rope=None)),
    "other theta": ("mistral_gqa", with_rope(theta=1e4)),
    "no linear scaling": ("llama_linear", with_rope(scaling=None)),
    "no llama3 scaling": ("llama_llama3", with_rope(scaling=None)),
    "no yarn scaling": ("llama_yarn", with_rope(scaling=None)),
    "all channels rotated": ("phi3_partial_rotary", with_rope(dim=16)),
    "fewer channels rotated": ("gpt_neox_interleaved", with_rope(dim=4)),
    "sequential residual": ("gpt_neox_interleaved", lambda c: replace(c, parallel_residual=False)),
    "parallel residual": ("gpt_neox_sequential", lambda c: replace(c, parallel_residual=True)),
    "scale of all layers alike": ("gpt2_by_layer", in_attention(scale=None)),
    "norm scales not from one": ("gemma_mqa", in_norm(unit_offset=False)),
    "embeddings not scaled": ("gemma_mqa", lambda c: replace(c, embed_scale=None)),
    "exact gelu": ("gemma_mqa", in_mlp(activation="gelu")),
    "tanh gelu": ("gpt_neox_sequential", in_mlp(activation="gelu_tanh")),
    "other rms eps": ("llama_gqa_tied", in_norm(eps=1e-6)),
    "other eps of q and k per head": ("qwen3_gqa", without_eps_of_qk),
    "other eps of q and k": ("olmo2_gqa", without_eps_of_qk),
    "other layer norm eps": ("gpt2_by_layer", in_norm(eps=1e-5)),
    "windowed": ("llama_mha", in_attention(window=8)),
    "a narrower window": ("mistral_window", in_attention(window=4)),
    "a wider window": ("mistral_window", in_attention(window=6)),
    "no window": ("mistral_window", in_attention(window=None)),
    "windows in all layers": ("qwen2_window", in_attention(window=8)),
    "no cap on scores": ("gemma2_window", in_attention(soft_cap=None)),
    "no cap on logits": ("gemma2_window", lambda c: replace(c, logit_cap=None)),
    "scale of the head dim": ("gemma2_window", in_attention(scale=None)),
    "one rope for all layers": ("gemma3_pattern", with_rope()),
    "scaling in windows alone": (
        "gemma3_pattern",
        in_layers(lambda a: replace(a, rope=replace(a.rope, scaling=None))),
    ),
    "norm of q and k not from one": (
        "gemma3_pattern",
        lambda c: in_attention(norm=replace(c.norm, unit_offset=False))(c),
    ),
    "gates not clamped": ("gpt_oss_window", in_gate(limit=7.0)),
    "other slope of gates": ("gpt_oss_defaults", in_gate(alpha=1.702)),
    "fewer experts a token": ("gpt_oss_window", in_mlp(chosen=1)),
    "fewer of mixtral's experts": ("mixtral_gqa", in_moe(chosen=2)),
    "mixtral's weights not normed": ("mixtral_gqa", in_moe(router=Router(normed=False))),
    "silu for gelu in experts": ("mixtral_window", in_moe(gate=Gated())),
    "weights not normed": ("qwen3_moe_dense_between", in_moe(router=Router(normed=False))),
    "weights normed": ("qwen3_moe_window", in_moe(router=Router())),
    "a scale without yarn's temperature": ("deepseek_v3_groups", in_attention(scale=None)),
    "yarn's temperature in rope too": (
        "deepseek_v3_groups",
        lambda c: with_rope(scaling=replace(c.attention[0].rope.scaling, magnitude=1.369))(c),
    ),
    "no yarn in latent attention": ("deepseek_v2_groups", with_rope(scaling=None)),
    "latents normed by the config's eps": (
        "deepseek_v2_groups",
        in_attention(norm=NormConfig(eps=1e-2)),
    ),
    "experts of all groups": (
        "deepseek_v2_groups",
        in_router(groups=None),
    ),
    "experts' weights not scaled": ("deepseek_v2_groups", in_router(scale=1.0)),
    "groups judged by their best": ("deepseek_v3_groups", in_router(groups=Groups(4, 2))),
    "softmax for sigmoids": ("deepseek_v3_groups", in_router(score="softmax")),
    "sigmoids' weights normed": ("deepseek_v3_one_group", in_router(normed=True)),
    "sub-layers not scaled": ("minicpm3_longrope", lambda c: replace(c, residual_scale=None)),
    "minicpm3's logits not scaled": (
        "minicpm3_longrope",
        lambda c: replace(c, logit_scale=None),
    ),
    "no longrope": ("minicpm3_longrope", with_rope(scaling=None)),
    "no yarn beside sinks": ("gpt_oss_window", with_rope(scaling=None)),
    "rope in all layers": (
        "cohere2_pattern",
        lambda c: in_attention(rope=c.attention[0].rope)(c),
    ),
    "logits not scaled": ("cohere2_pattern", lambda c: replace(c, logit_scale=None)),
    "other eps without bias": ("cohere2_pattern", in_norm(eps=1e-5)),
}


def test_sinks_take_their_share():
    _, tokens, expected = read("gpt_oss_window")
    silent = models.load(GOLDEN / "gpt_oss_window", dtype="f32")
    for layer in silent.layers:
        layer.attention.sink_logits[...] = layer.attention.sink_logits[...] - 100
    assert difference(forward(silent, tokens), expected) > 10 * TOLERANCE


def test_routers_are_corrected():
    _, tokens, expected = read("deepseek_v3_groups")
    uncorrected = models.load(GOLDEN / "deepseek_v3_groups", dtype="f32")
    mlp = uncorrected.layers[1].mlp
    mlp.correction[...] = 0 * mlp.correction[...]
    assert difference(forward(uncorrected, tokens), expected) > 10 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "change"), MISSET.values(), ids=MISSET)
def test_a_wrong_setting_shows(name, change):
    """The same parameters in a decoder with another setting."""
    model, tokens, expected = read(name)
    wrong = abstract_decoder(change(model.config))
    misset = jax.tree.unflatten(jax.tree.structure(wrong), jax.tree.leaves(model))
    assert difference(forward(misset, tokens), expected) > TOLERANCE
