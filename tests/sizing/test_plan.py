"""Plans against counts by hand, and against every smaller plan."""

import math

import pytest

from kvjax.sizing import (
    CHIPS,
    Chip,
    Demand,
    LayerSpec,
    ModelSpec,
    Weights,
    batch_floors,
    load,
    plan,
)
from kvjax.sizing.plan import Plan, Spread

GIB = 2**30
LLAMA = load(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
)
TOKEN = 131_072  # bytes of bf16 K and V
TABLES = 32 * 5  # of a sequence


def only(demand: Demand, chip: str | Chip, **limits: int) -> Plan:
    (found,) = plan(LLAMA, demand, [chip], **limits)
    return found


def test_one_chip_that_holds_all():
    found = only(Demand({8192: 1}, batch=64), "H200")
    assert found.spread == Spread(1, 1, 1)
    assert found.weight_bytes == LLAMA.parameters * 2 == 16_060_522_496
    assert found.cache_bytes == 64 * (8192 * TOKEN + TABLES)
    assert found.usable_bytes == 126_900_000_000
    assert found.largest_batch == (126_900_000_000 - 16_060_522_496) // (8192 * TOKEN + TABLES)
    assert found.floor == LLAMA.decode_floor("H200", 8192, 64)
    assert found.tokens_per_second == pytest.approx(64 / found.floor.seconds)


def test_shards_halve_weights_and_cache():
    found = only(Demand({8192: 1}, batch=64), "H100-SXM")
    assert (found.chips, found.spread.dp) == (2, 1)
    assert found.weight_bytes == 8_030_261_248
    assert found.cache_bytes <= 33 * (8192 * TOKEN + TABLES)


def test_a_page_and_precisions_count():
    exact = only(Demand({8190: 1}, batch=64), "H200")
    paged = only(Demand({8190: 1}, batch=64, page_size=16), "H200")
    assert paged.cache_bytes == 64 * (8192 * TOKEN + TABLES + 32 * 512 * 4) > exact.cache_bytes
    small = only(Demand({8190: 1}, batch=64, codec="fp8", weights="fp8"), "H200")
    assert small.cache_bytes == 64 * (8190 * TOKEN // 2 + TABLES) + 32 * 8
    assert small.weight_bytes == LLAMA.weight_bytes("fp8") < 0.6 * exact.weight_bytes


def test_the_source_of_an_encoder_decoder_counts():
    layers = (LayerSpec(8, 8, 64, 64), LayerSpec(8, 8, 64, 64, cross=True))
    spec = ModelSpec("test", 512, layers, weights=Weights(head=10**6))
    for source in (0, 3000):
        (found,) = plan(spec, Demand({1024: 1}, batch=4, source_tokens=source), ["H200"])
        assert found.cache_bytes == 4 * ((1024 + source) * 2048 + 2 * 5)
        assert found.floor == spec.decode_floor("H200", 1024, 4, source_tokens=source)


def test_a_mix_costs_its_mean():
    found = only(Demand({2048: 0.75, 32768: 0.25}, batch=8), "H200")
    assert found.cache_bytes == 8 * (0.75 * 2048 + 0.25 * 32768) * TOKEN + 8 * TABLES
    short, long = (LLAMA.decode_floor("H200", n, 8).seconds for n in (2048, 32768))
    assert found.floor.seconds == pytest.approx(0.75 * short + 0.25 * long)


def test_the_fewest_chips():
    """No smaller number of chips holds the batch, whatever the spread; the one found does."""
    for batch in (1, 100, 300, 1000):
        found = only(Demand({8192: 1}, batch=batch), "H100-SXM")
        assert found.batch == batch <= found.largest_batch
        assert found.weight_bytes + found.cache_bytes <= found.usable_bytes
        if found.chips > 1:
            fewer = only(Demand({8192: 1}, batch=batch), "H100-SXM", max_chips=found.chips - 1)
            assert fewer.spread is None
            assert "too few for" in fewer.reason


def test_a_rate_is_met_by_the_smallest_batch():
    demand = Demand({8192: 1}, tokens_per_second=20_000)
    found = only(demand, "H200")
    assert found.tokens_per_second >= 20_000
    each = found.batch // found.spread.dp
    slower = LLAMA.decode_floor("H200", 8192, each - 1)
    assert found.spread.dp * (each - 1) / slower.seconds < 20_000
    fewer = only(demand, "H200", max_chips=found.chips - 1)
    assert (fewer.spread, fewer.chips) == (None, 0)
    assert fewer.figures() == {"chip": "H200", "fits": False, "reason": fewer.reason}


def test_weights_that_no_number_of_chips_holds():
    found = only(Demand({8192: 1}, batch=1), "TPU-v5e", max_chips=1)
    assert found.reason == "1 chips: too few for weights"


def test_stages_work_on_parts_of_the_batch_at_once():
    chip = Chip("small", 9 * 10**9, 1e12, 1e14, None, "by definition")
    found = only(Demand({1024: 1}, batch=8), chip, max_tp=1)
    assert found.spread == Spread(1, 4, 1)
    assert found.floor == LLAMA.decode_floor(chip, 1024, 2)
    assert found.tokens_per_second == pytest.approx(8 / found.floor.seconds)


def test_a_cache_that_stops_growing_and_one_that_is_empty():
    windowed = ModelSpec(
        "test",
        64,
        (LayerSpec(1, 1, 8, 8, window=4),),
        weights=Weights(ffn=0, head=64, lookup=0, small=0),
    )
    (found,) = plan(windowed, Demand({10**9: 1}, batch=5), ["H200"])
    assert found.largest_batch == (126_900_000_000 - found.weight_bytes) // (4 * 32 + 5)
    none = ModelSpec("test", 64, (LayerSpec(0, 0, 0, 0, kind="state"),), weights=windowed.weights)
    (found,) = plan(none, Demand({8: 1}, batch=5), ["H200"])
    assert found.largest_batch == math.inf
    assert found.figures()["largest_batch"] is None


def test_floors_over_the_batch():
    demand = Demand({8192: 1}, batch=64)
    plans = plan(LLAMA, demand, ["H200", "TPU-v5e"], max_chips=2)
    sweeps = batch_floors(LLAMA, demand, plans)
    assert list(sweeps) == ["1 × H200"]
    assert [row["batch"] for row in sweeps["1 × H200"]] == [1, 2, 4, 8, 16, 32, 64]
    for row in sweeps["1 × H200"]:
        assert row["floor_seconds"] == LLAMA.decode_floor("H200", 8192, row["batch"]).seconds


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Demand({8: 1}), "batch: got None with tokens_per_second None; accepted: one of"),
        (lambda: Demand({8: 1}, 1, 1.0), "batch: got 1 with tokens_per_second 1.0"),
        (lambda: Demand({8: 1}, 0), "batch: got 0"),
        (lambda: Demand({8: 1}, 1, source_tokens=-1), "source_tokens: got -1"),
        (lambda: Demand({8: 1}, tokens_per_second=0), "tokens_per_second: got 0"),
        (lambda: Demand({}, 1), "lengths: got {}"),
        (lambda: Demand({8: -1}, 1), "lengths: got {8: -1}"),
        (lambda: Demand({8: math.inf}, 1), "lengths: got {8: inf}"),
        (lambda: Demand([8], 1), r"lengths: got \[8\]; accepted: shares of 0 or more by length"),
        (lambda: Demand({8: 1}, tokens_per_second=math.inf), "tokens_per_second: got inf"),
        (lambda: Demand({8: 1}, tokens_per_second="9"), "tokens_per_second: got '9'"),
        (lambda: Demand({8: 1}, 1, memory_share="1"), "memory_share: got '1'"),
        (lambda: Demand({0: 1}, 1), "tokens: got 0"),
        (lambda: Demand({8: 1}, 1, memory_share=0), "memory_share: got 0"),
        (lambda: Demand({8: 1}, 1, memory_share=1.5), "memory_share: got 1.5"),
        (lambda: plan(LLAMA, Demand({8: 1}, 1), ["H300"]), "chip: got 'H300'"),
        (lambda: plan(LLAMA, Demand({8: 1}, 1), max_tp=0), "max_tp: got 0"),
        (lambda: plan(LLAMA, Demand({8: 1}, 1), max_chips=0), "max_chips: got 0"),
        (lambda: plan(LLAMA, Demand({8: 1}, 1, codec="int3")), "codec: got 'int3'"),
        (lambda: plan(LLAMA, Demand({8: 1}, 1, weights="int3")), "int3"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_chip_is_planned_for():
    assert [found.chip for found in plan(LLAMA, Demand({8192: 1}, batch=1))] == list(CHIPS)
