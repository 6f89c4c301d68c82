"""Sweeps over batch and context, and the two lengths and batches at which something changes."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.sizing import CHIPS, LayerSpec, ModelSpec, Weights, sweeps

GQA = ModelSpec("test", 512, (LayerSpec(8, 2, 64, 64),) * 3, Weights(ffn=10_000_000))
SLIDING = ModelSpec("test", 512, (LayerSpec(8, 2, 64, 64, window=16),), Weights(ffn=10**6))
LATENT = ModelSpec(
    "test",
    512,
    (LayerSpec(128, 1, 192, 128, kind="latent", latent_rank=512, rope_dim=64),),
)


def test_rows_are_floors():
    (row,) = sweeps.batch_sweep(GQA, "H200", 100, [7], codec="fp8", tp=2)
    floor = GQA.decode_floor("H200", 100, 7, codec="fp8", tp=2)
    assert row == {
        "batch": 7,
        "tokens": 100,
        "floor_seconds": floor.seconds,
        "binds": floor.binds,
        "tokens_per_second": 7 / floor.seconds,
        "cache_bytes": GQA.cache_bytes(100, 7, "fp8", tp=2).total,
    }
    assert [row] == sweeps.context_sweep(GQA, "H200", [100], 7, codec="fp8", tp=2)


def test_a_batch_shares_the_weights_until_the_matrix_units_bind():
    rows = sweeps.batch_sweep(GQA, "H200", 4, [2**power for power in range(14)])
    assert [row["batch"] for row in rows] == [2**power for power in range(14)]
    rates = [row["tokens_per_second"] for row in rows]
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(rates))
    assert rates[1] > 1.9 * rates[0]
    assert (rows[0]["binds"], rows[-1]["binds"]) == ("memory", "matrix")
    assert rates[-1] == pytest.approx(rates[-2])


def test_a_longer_context_costs_its_cache():
    short, long = sweeps.context_sweep(GQA, "H200", [1000, 3000], batch=4)
    read = GQA.cache_bytes(3000, 4).read_per_step - GQA.cache_bytes(1000, 4).read_per_step
    assert long["floor_seconds"] - short["floor_seconds"] == pytest.approx(
        read / CHIPS["H200"].bytes_per_second
    )
    first, last = sweeps.context_sweep(SLIDING, "H200", [16, 10**6])
    assert first["floor_seconds"] == last["floor_seconds"]


def test_mla_absorbed_and_expanded():
    """Absorbed the matrix units bind on an H200, 242 FLOP/B; expanded memory does, at 1."""
    (absorbed,), (expanded,) = (
        sweeps.context_sweep(spec, "H200", [8192], 64, weight_bytes=0)
        for spec in (LATENT, LATENT.expanded())
    )
    assert (absorbed["binds"], expanded["binds"]) == ("matrix", "memory")
    assert expanded["cache_bytes"] / absorbed["cache_bytes"] == pytest.approx(
        128 * 320 / 576, rel=1e-4
    )
    (on_h100,) = sweeps.context_sweep(LATENT, "H100-SXM", [8192], 64, weight_bytes=0)
    assert on_h100["binds"] == "memory"


@given(st.integers(1, 9), st.sampled_from(["bf16", "fp8", "int4"]), st.integers(1, 4))
def test_crossover_is_the_last_length_at_which_the_cache_is_no_heavier(batch, codec, tp):
    tokens = sweeps.crossover_tokens(GQA, batch, codec, tp=tp)
    weights = GQA.parameters * 2 / tp
    assert GQA.cache_bytes(tokens, batch, codec, tp=tp).allocated <= weights
    assert GQA.cache_bytes(tokens + 1, batch, codec, tp=tp).allocated > weights


def test_crossover_counts_the_weights_as_they_are_stored():
    given_bytes = sweeps.crossover_tokens(GQA, weight_bytes=GQA.parameters * 4)
    assert sweeps.crossover_tokens(GQA, weight_codec="f32") == given_bytes
    assert sweeps.crossover_tokens(GQA) == given_bytes // 2
    assert sweeps.crossover_tokens(SLIDING) == math.inf


@given(
    st.integers(1, 10**5),
    st.sampled_from(["bf16", "fp8"]),
    st.integers(1, 4),
    st.floats(0.1, 1),
)
def test_batch_ceiling_is_the_largest_batch_that_fits(tokens, codec, tp, share):
    batch = sweeps.batch_ceiling(GQA, "TPU-v5e", tokens, codec, memory_share=share, tp=tp)
    free = CHIPS["TPU-v5e"].memory_bytes * share - GQA.parameters * 2 / tp

    def total(batch):
        return GQA.cache_bytes(tokens, batch, codec, tp=tp).total

    assert total(batch) <= free if batch else total(1) > free
    # Scales that a layer keeps once are counted with every sequence: few bytes, for certain.
    assert total(batch + 1) > free - 100 * (batch + 1)


def test_no_batch_fits_where_the_weights_do_not():
    assert sweeps.batch_ceiling(GQA, "H200", 100, weight_bytes=142e9) == 0
    assert sweeps.batch_ceiling(GQA, "H200", 100, weight_bytes=140e9) > 0
    assert sweeps.batch_ceiling(GQA, "H200", 100, weight_bytes=140e9, memory_share=0.9) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sweeps.batch_sweep(GQA, "H300", 1, [1]), "chip: got 'H300'"),
        (lambda: sweeps.batch_sweep(GQA, "H200", 1, [0]), "batch: got 0"),
        (lambda: sweeps.context_sweep(GQA, "H200", [-1]), "tokens: got -1"),
        (lambda: sweeps.crossover_tokens(GQA, weight_bytes=-1), "weight_bytes: got -1"),
        (lambda: sweeps.crossover_tokens(LATENT), "weights: the spec has none"),
        (lambda: sweeps.batch_ceiling(GQA, "H200", -1), "tokens: got -1"),
        (
            lambda: sweeps.batch_ceiling(GQA, "H200", 1, memory_share=1.5),
            "memory_share: got 1.5; accepted: more than 0, at most 1",
        ),
    ],
)
def test_refusals_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
