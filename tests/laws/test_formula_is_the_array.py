"""Law 2: what sizing says is what the arrays of a live cache take."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from kvjax import models, sizing
from kvjax.cache import Paged, SinkRing
from kvjax.engine import decode, prefill
from kvjax.nn import Decoder, DecoderConfig, MlpConfig, Rope
from laws.members import CODECS, GROUPS, LATENT

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("llama_mha", "gemma_mqa", "qwen3_mha", "olmo2_gqa", "gpt2_conv1d", "gpt_neox_sequential")

# Of more than two tiles, the last of which is not full; and 16 bits of the rope key are more than 8
# and a scale.
WIDE = replace(LATENT, latent_rank=300, rope_dim=8, rope=Rope(8))
LATENTS = {"latent": WIDE, "windowed latent": replace(WIDE, window=5)}


@cache
def model(name):
    if name not in LATENTS:
        return models.load(GOLDEN / name)
    config = DecoderConfig(8, LATENT.d_model, attention=(LATENTS[name],) * 2, mlp=MlpConfig(4))
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def spec_of(name) -> sizing.ModelSpec:
    if name not in LATENTS:
        return sizing.load(GOLDEN / name)
    a = LATENTS[name]
    layer = sizing.LayerSpec(
        a.query_heads,
        1,
        a.head_dim + a.rope_dim,
        a.head_value_dim,
        kind="latent",
        window=a.window,
        latent_rank=a.latent_rank,
        rope_dim=a.rope_dim,
    )
    return sizing.ModelSpec("latents", a.d_model, (layer,) * 2)


def said_of(spec, layout) -> tuple[sizing.ModelSpec, dict]:
    """The spec and the arguments of `cache_bytes` that speak of a layout."""
    if isinstance(layout, Paged):
        return spec, {"page_size": layout.page_size}
    if isinstance(layout, SinkRing):  # which is a window with its sinks beside it
        slots = layout.sink_tokens + layout.window
        layers = tuple(replace(layer, window=slots) for layer in spec.layers)
        return replace(spec, layers=layers), {}
    return spec, {}


def assert_bytes_are_said(name, batch, capacity, layout, codec):
    cache = model(name).init_cache(batch, capacity, layout, codec)
    spec, placing = said_of(spec_of(name), layout)
    said = spec.cache_bytes(capacity, batch, getattr(codec, "spec", codec), **placing)
    live = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert live == said.allocated + said.state + said.tables
    assert live == cache.nbytes


@pytest.mark.parametrize("name", [*NAMES, "latent"])
def test_bytes_of_a_cache(name, cache_case):
    for batch, capacity in ((1, 1), (1, 32), (3, 7)):
        assert_bytes_are_said(name, batch, capacity, cache_case.layout, cache_case.codec)


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_of_a_ring_of_latents(codec):
    assert_bytes_are_said("windowed latent", 3, 32, "ring", codec)


@pytest.mark.parametrize("case", GROUPS)
def test_bytes_of_groups_of_latents(case):
    layout, kivi, _ = GROUPS[case]
    for capacity in (8, 32):
        assert_bytes_are_said("latent", 3, capacity, layout, kivi)


@pytest.mark.parametrize(
    ("name", "per_head"),
    [
        ("llama_gqa_tied", False),
        ("llama_gqa_tied", True),
        pytest.param("latent", False, marks=pytest.mark.slow),
    ],
)
def test_bytes_of_what_an_eviction_leaves(name, per_head, cache_case):
    spec, kept = spec_of(name), sizing.Kept(5, room=3, per_head=per_head)
    cache = model(name).init_cache(2, 12, cache_case.layout, cache_case.codec)
    indices = np.tile(np.arange(5), (2, spec.layers[0].kv_heads if per_head else 1, 1))
    after = [layer.keep(indices, 3) for layer in cache.layers]
    live = sum(leaf.nbytes for leaf in jax.tree.leaves(after))
    said = spec.cache_bytes(12, 2, cache_case.codec, kept=kept)
    assert live == said.total == sum(layer.nbytes for layer in after)


def test_live_records_are_the_ideal(cache_case):
    """The share of each array that live positions take, after rows of 3 tokens in 8 slots."""
    batch, capacity, tokens = 2, 8, 3
    cache = model("llama_gqa_tied").init_cache(batch, capacity, cache_case.layout, cache_case.codec)
    ones = np.ones((batch, tokens), np.int32)
    _, cache = prefill(model("llama_gqa_tied"), ones, cache, np.full(batch, tokens, np.int32))
    live = 0
    for layer in cache.layers:
        positions = [layer.block(i).pos for i in range(int(layer.blocks()))]
        slots = sum(
            int(np.broadcast_to(pos >= 0, (batch, *pos.shape[1:])).sum()) for pos in positions
        )
        heads = positions[0].shape[1]
        leaves = layer.leaves.values()
        stored = sum(leaf.nbytes // (leaf.shape[0] * leaf.shape[2]) for leaf in leaves)
        live += stored * slots // heads
    said = sizing.load(GOLDEN / "llama_gqa_tied").cache_bytes(tokens, batch, cache_case.codec)
    assert live == said.ideal == said.read_per_step


def test_a_step_changes_none(cache_case):
    cache = model("llama_mha").init_cache(2, 8, cache_case.layout, cache_case.codec)
    before = cache.nbytes
    _, cache = decode(model("llama_mha"), np.ones((2, 1), np.int32), cache, np.ones(2, np.int32))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == before
