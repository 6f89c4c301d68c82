"""Laws 3 and 4 on the compiled step, for every layout and codec; and how many blocks each reads."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from kvjax.cache import CodecChoice, Kivi, LayerCache, Paged, SinkRing, init_layer_cache
from kvjax.cache.protocol import BLOCK
from kvjax.engine import decode
from laws.compiled import (
    LAYOUTS,
    SLACK,
    Step,
    assert_in_place,
    assert_loops_follow_the_length,
    assert_only_tokens_are_written,
    compiled,
    growth_with_capacity,
    growth_with_group,
    measure,
)

CODECS = ("f32", "bf16", "fp8_e4m3", "fp8_e4m3_token", "int8", "int4", "fp8_ds_mla")
LAYERS = (0, 1)
# Each layout once, and steps of one token and of eight.
QUICK = {
    (8, "ring", "int4"),
    (1, "sinks", "bf16"),
    (8, "reindexed sinks", "f32"),
    (1, "kept by each head", "fp8_e4m3_token"),
    (1, "dense", "kivi2"),
    (8, "pages", "int8"),
}


def product() -> list[tuple[int, str, str]]:
    slots = [(layout, codec) for layout in LAYOUTS for codec in CODECS]
    groups = [(layout, codec) for layout in ("dense", "pages") for codec in ("kivi2", "kivi4")]
    return [(tokens, *pair) for tokens in (1, 8) for pair in (*slots, *groups)]


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(
            Step(tokens, layout=layout, codec=codec, producers=LAYERS),
            id=f"decode {tokens}, {layout}, {codec}",
            marks=() if (tokens, layout, codec) in QUICK else pytest.mark.slow,
        )
        for tokens, layout, codec in product()
    ],
)
class TestCompiledStep:
    def test_the_cache_is_written_in_place(self, step):
        assert_in_place(measure(decode, step))

    def test_temporaries_do_not_grow_with_the_capacity(self, step):
        assert abs(growth_with_capacity(decode, step)) <= SLACK

    def test_no_key_or_value_is_repeated_for_its_group(self, step):
        assert growth_with_group(decode, step) <= SLACK

    def test_cost_follows_the_live_length(self, step):
        text = compiled(decode, step).as_text()
        assert_loops_follow_the_length(text, len(LAYERS))
        assert_only_tokens_are_written(text, step)


def holding(n: int, capacity: int, codec: CodecChoice = "f32", **settings) -> LayerCache:
    """A row of n tokens, of which nothing but the count was written."""
    cache = init_layer_cache(
        1, capacity, kv_heads=1, key_dim=4, value_dim=4, codec=codec, **settings
    )
    return replace(cache, n=jnp.array([n], jnp.int32))


@pytest.mark.parametrize("capacity", [2**14, 2**15])
@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({}, None),
        ({"layout": Paged(16)}, None),
        ({"layout": "ring", "window": 1024}, 1024),
        ({"layout": SinkRing(4, 1020)}, 1024),
        ({"layout": SinkRing(4, 1020, reindexed=True)}, 1024),
    ],
    ids=["dense", "pages", "ring", "sinks", "reindexed sinks"],
)
@pytest.mark.parametrize("codec", ["f32", "int4"])
def test_blocks_follow_what_is_live(settings, slots, codec, capacity):
    """Of 16384 tokens a ring of 1024 has the blocks of 1024, whatever it was made for."""
    for n in (0, 1, 512, 513, 2**14):
        live = n if slots is None else min(n, slots)
        assert holding(n, capacity, codec, **settings).blocks() == -(-live // BLOCK)


@pytest.mark.parametrize("layout", ["dense", Paged(512)], ids=str)
def test_blocks_of_groups_follow_what_is_live(layout):
    """Blocks of codes, and one more at most of exact tokens."""
    for n in (0, 1, 512, 513, 2**14):
        counts = []
        for capacity in (2**14, 2**15):
            cache = holding(n, capacity, Kivi(4, group=4, residual=512), layout=layout)
            assert jax.eval_shape(cache.block, 0).k.shape[2] == BLOCK
            counts.append(int(cache.blocks()))
        assert counts[0] == counts[1]
        assert -(-n // BLOCK) <= counts[0] <= -(-n // BLOCK) + 1


def test_blocks_of_what_is_kept_are_few():
    cache = holding(2**14, 2**14).keep(jnp.arange(1024)[None, None], room=4096)
    assert cache.blocks() == 2
    assert replace(cache, live=cache.live + 1).blocks() == 3
