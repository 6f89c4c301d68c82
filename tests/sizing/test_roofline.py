"""The floor of a decode step: each ceiling by hand, what is counted in it, shards, experts."""

from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.sizing import CHIPS, LayerSpec, ModelSpec, State, Weights, state_layer
from kvjax.sizing.roofline import SOFTMAX_FLOP, Chip, DecodeFloor, Work, decode_floor
from kvjax.sizing.weights import Experts

# Rates that differ by more than rounding and are easy to divide by.
UNIT = Chip("unit", 0, 1.0, 10.0, None, "by definition", 100.0, 1000.0)
GQA = LayerSpec(8, 2, 64, 32)


def spec(*layers: LayerSpec, weights: Weights | None = None) -> ModelSpec:
    return ModelSpec("test", 512, layers, weights)


def asked(model: ModelSpec, tokens: int, batch: int = 1, **step) -> Work:
    """The work behind a floor, read back from a chip of known rates."""
    at = model.decode_floor(UNIT, tokens, batch, **{"weight_bytes": 0, **step}).ceilings
    return Work(at["memory"], 10 * at["matrix"], 100 * at["vector"], 1000 * at["exponential"])


def same(work: Work, memory: float, matrix: float, vector: float, exponentials: float) -> bool:
    return astuple(work) == pytest.approx((memory, matrix, vector, exponentials))


def test_each_ceiling_has_its_own_rate():
    floor = decode_floor(UNIT, Work(2.0, 30.0, 400.0, 5000.0))
    assert floor.ceilings == {"memory": 2.0, "matrix": 3.0, "vector": 4.0, "exponential": 5.0}
    assert (floor.seconds, floor.binds) == (5.0, "exponential")


@pytest.mark.parametrize("binds", ["memory", "matrix", "vector", "exponential"])
def test_the_longest_ceiling_binds(binds):
    ceilings = dict.fromkeys(("memory", "matrix", "vector", "exponential"), 1.0) | {binds: 1.5}
    assert (DecodeFloor(ceilings).seconds, DecodeFloor(ceilings).binds) == (1.5, binds)


def test_a_ceiling_whose_rate_is_unknown_is_absent():
    found = spec(GQA).decode_floor("TPU-v5e", 100, weight_bytes=0)
    assert set(found.ceilings) == {"memory", "matrix"}
    assert set(spec(GQA).decode_floor("MI300X", 100, weight_bytes=0).ceilings) == {
        "memory",
        "matrix",
        "vector",
    }


def test_work_of_gqa_by_hand():
    """3 sequences of 10 keys: 8 heads, 96 multiply-adds a score, 2 x 96 numbers read a key."""
    scores = 3 * 10 * 8
    read = 3 * 10 * 2 * (64 + 32) * 2
    assert same(asked(spec(GQA), 10, 3), read, 2 * 96 * scores, 4 * scores, scores)
    assert same(asked(spec(GQA), 10, 3, products="vector"), read, 0, (2 * 96 + 4) * scores, scores)
    assert SOFTMAX_FLOP == 4


def test_a_latent_is_decoded_absorbed_and_an_expanded_one_is_not():
    latent = spec(LayerSpec(16, 1, 24, 16, kind="latent", latent_rank=32, rope_dim=8))
    assert same(asked(latent, 10), 10 * (32 + 8) * 2, 2 * (32 + 8 + 32) * 160, 640, 160)
    assert same(
        asked(latent.expanded(), 10), 10 * 16 * (24 + 16) * 2, 2 * (24 + 16) * 160, 640, 160
    )


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (LayerSpec(64, 64, 128, 128), 1),
        (LayerSpec(64, 8, 128, 128), 8),
        (LayerSpec(64, 1, 128, 128), 64),
        (LayerSpec(64, 1, 128, 128, kind="latent", latent_rank=512), 2 * 64),
        (LayerSpec(64, 2, 128, 128, kind="latent", latent_rank=256), 64),
        (LayerSpec(64, 8, 128, 128, kind="tied"), 2 * 8),
    ],
    ids=["MHA", "GQA-8", "MQA", "MLA", "GLA-2", "GTA-8"],
)
def test_published_work_per_byte(layer, expected):
    """Zadouri et al. 2025 (arXiv:2505.21487), for long contexts and without rope keys."""
    assert spec(layer).intensity() == expected
    work = asked(spec(layer), 1000, 3)
    assert work.matrix_flop / work.memory_bytes == pytest.approx(expected)


def test_windows_and_picked_tokens_score_what_they_read():
    sliding, picking = replace(GQA, window=4), replace(GQA, index_dim=16, index_top=5)
    assert asked(spec(sliding), 100).exponentials == pytest.approx(4 * 8)
    assert asked(spec(picking), 100).exponentials == pytest.approx(5 * 8)
    assert asked(spec(replace(GQA, window=200)), 100) == asked(spec(GQA), 100)


def test_states_are_read_and_written_whole():
    """A recurrent state of f32 and a convolution's of the activations' two bytes."""
    mamba = state_layer(State("recurrent", 100, itemsize=4), State("conv", 30))
    assert same(asked(spec(mamba), 1000, 3), 2 * 3 * (400 + 60), 0, 0, 0)
    assert asked(spec(mamba, GQA), 10).memory_bytes == pytest.approx(
        2 * 460 + asked(spec(GQA), 10).memory_bytes
    )


def test_cross_attention_scores_the_source():
    model = spec(GQA, replace(GQA, cross=True))
    own, source = asked(spec(GQA), 10), asked(spec(GQA), 70)
    found = asked(model, 10, source_tokens=70)
    assert found.memory_bytes == pytest.approx(own.memory_bytes + source.memory_bytes)
    assert found.exponentials == pytest.approx(own.exponentials + source.exponentials)
    assert asked(model, 10) == own


def test_weights_are_read_once_and_multiplied_with_every_sequence():
    model = spec(GQA, weights=Weights(ffn=1000, head=500, lookup=10**6, small=7))
    counted = model.attention_parameters + 1507
    bare = asked(model, 10, 5)
    found = asked(model, 10, 5, weight_bytes=None)
    assert found.memory_bytes - bare.memory_bytes == pytest.approx(2 * counted)
    assert found.matrix_flop - bare.matrix_flop == pytest.approx(2 * 5 * counted)
    in_f32 = asked(model, 10, 5, weight_bytes=None, weight_codec="f32")
    assert in_f32.memory_bytes - bare.memory_bytes == pytest.approx(4 * counted)
    assert in_f32.matrix_flop == pytest.approx(found.matrix_flop)


def test_experts_are_read_as_far_as_a_batch_needs_them():
    """2 of 8 experts a token: 1 - (6/8)^B of them are read, 2 multiplied with each token."""
    model = spec(GQA, weights=Weights(ffn=100, experts=(Experts(8, 2, each=4096),)))
    always = model.attention_parameters + 100
    for batch, experts in ((1, 2), (2, 3.5), (3, 4.625)):
        bare = asked(model, 10, batch)
        found = asked(model, 10, batch, weight_bytes=None)
        assert found.memory_bytes - bare.memory_bytes == pytest.approx(
            2 * (always + experts * 4096)
        )
        assert found.matrix_flop - bare.matrix_flop == pytest.approx(
            2 * batch * (always + 2 * 4096)
        )


def test_shards_split_weights_and_heads_and_repeat_what_they_must():
    model = spec(GQA, weights=Weights(ffn=4096))
    one, two, eight = (asked(model, 10, 3, weight_bytes=None, tp=tp) for tp in (1, 2, 8))
    for name in ("memory_bytes", "matrix_flop", "vector_flop", "exponentials"):
        assert getattr(two, name) == pytest.approx(getattr(one, name) / 2)
    assert eight.matrix_flop == pytest.approx(one.matrix_flop / 8)
    # Two KV heads over eight shards: each holds one, a half of the cache and not an eighth.
    weights = 2 * (model.attention_parameters + 4096)
    assert eight.memory_bytes == pytest.approx(weights / 8 + (one.memory_bytes - weights) / 2)
    # Eight query heads over three shards: the fullest has three.
    assert asked(model, 10, tp=3).exponentials == pytest.approx(3 * 10)


@given(
    st.integers(0, 5000),
    st.integers(1, 64),
    st.integers(1, 9),
    st.sampled_from(["matrix", "vector"]),
)
def test_no_ceiling_falls_with_more_tokens_or_sequences_or_rises_with_shards(
    tokens, batch, tp, products
):
    model = spec(GQA, replace(GQA, window=100), weights=Weights(ffn=999))

    def ceilings(tokens, batch, tp):
        return model.decode_floor("B300", tokens, batch, products=products, tp=tp).ceilings

    here = ceilings(tokens, batch, tp)
    for more in (ceilings(tokens + 1, batch, tp), ceilings(tokens, batch + 1, tp)):
        assert all(more[name] >= here[name] for name in here)
    assert all(ceilings(tokens, batch, tp + 1)[name] <= here[name] for name in here)


def test_moving_the_products_moves_their_flop_and_nothing_else():
    """Qwen3-32B's heads on a B300 at 9.4 FLOP/B: on the vector units GQA of 16 is above it."""
    model = spec(LayerSpec(64, 4, 128, 128))
    assert model.intensity() == 16 > CHIPS["B300"].vector_ridge
    matrix, vector = (
        model.decode_floor("B300", 8192, 8, weight_bytes=0, products=units)
        for units in ("matrix", "vector")
    )
    assert (matrix.binds, vector.binds) == ("memory", "vector")
    assert matrix.ceilings["memory"] == vector.ceilings["memory"]
    assert matrix.ceilings["exponential"] == vector.ceilings["exponential"]
    assert vector.ceilings["matrix"] == 0


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"products": "tensor"}, "products: got 'tensor'; accepted: 'matrix', 'vector'"),
        ({"tp": 0}, "tp: got 0"),
        ({"source_tokens": -1}, "source_tokens: got -1"),
        ({"weight_bytes": -1.0}, "weight_bytes: got -1.0; accepted: 0 or more"),
        ({"weight_bytes": None}, "weights: the spec has none"),
        ({"codec": "int3"}, "codec: got 'int3'"),
    ],
)
def test_refusals_name_the_argument(step, message):
    with pytest.raises(ValueError, match=message):
        asked(spec(GQA), 10, **step)
