"""Bytes, their inverse, intensity and floors of specs built by hand."""

import math

import pytest

from kvjax.sizing import CHIPS, CODECS, LayerSpec, ModelSpec, Pool, State, codec, state_layer

GIB = 2**30


def plain(depth: int, query_heads: int, kv_heads: int, head_dim: int = 128, **fields) -> ModelSpec:
    layer = LayerSpec(query_heads, kv_heads, head_dim, head_dim, **fields)
    return ModelSpec("test", query_heads * head_dim, (layer,) * depth)


def test_published_per_token_figures():
    assert plain(32, 32, 8).bytes_per_token() == 131_072  # Llama-3-8B
    assert plain(40, 32, 8).bytes_per_token() == 163_840  # Mistral-Nemo
    # Qwen3-32B: 64 heads of 128. 163,840 is printed where 5120 / 64 is taken for the head width.
    assert plain(64, 64, 8).bytes_per_token() == 262_144
    assert plain(64, 64, 8, head_dim=5120 // 64).bytes_per_token() == 163_840


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 73_728), (128, 9_437_184), (129, 9_474_048), (8192, 306_708_480)],
)
def test_alternating_windows_of_gpt_oss_120b(tokens, expected):
    full, sliding = (LayerSpec(64, 8, 64, 64, window=window) for window in (None, 128))
    spec = ModelSpec("test", 2880, (sliding, full) * 18)
    found = spec.cache_bytes(tokens)
    assert found.ideal == found.allocated == found.read_per_step == expected


def test_sharing_lowers_what_is_kept_and_not_what_is_read():
    """CLA (Brandon et al. 2024, table 1): MQA of 20 layers, 10,240 bytes a token; CLA2 half."""
    mqa = plain(20, 16, 1)
    own = mqa.layers[0]
    cla2 = ModelSpec(
        "test",
        2048,
        tuple(
            own if i % 2 == 0 else LayerSpec(16, 1, 128, 128, shares_with=i - 1) for i in range(20)
        ),
    )
    assert mqa.bytes_per_token() == 10_240
    assert cla2.bytes_per_token() == 5_120
    assert cla2.cache_bytes(100).read_per_step == mqa.cache_bytes(100).read_per_step
    assert cla2.cache_bytes(1).tables == mqa.cache_bytes(1).tables // 2
    # The reading layers have no k and v projections: 2 * 128 columns less in ten layers.
    assert mqa.attention_parameters - cla2.attention_parameters == 10 * 2048 * 2 * 128


def test_shared_windows_of_gemma_3n_e4b():
    """35 layers, every fifth one full; the last 15 read layers 18 (sliding) and 19 (full)."""
    spec = ModelSpec(
        "test",
        2048,
        tuple(
            LayerSpec(
                8,
                2,
                256,
                256,
                window=None if (i + 1) % 5 == 0 else 512,
                shares_with=None if i < 20 else (19 if (i + 1) % 5 == 0 else 18),
            )
            for i in range(35)
        ),
    )
    assert spec.cache_bytes(2048).allocated == 33_554_432


@pytest.mark.parametrize(("tp", "share"), [(1, 8), (2, 4), (3, 3), (8, 1), (16, 1)])
def test_shards_hold_whole_heads_and_repeat_them(tp, share):
    spec = plain(2, 32, 8)
    assert spec.cache_bytes(10, tp=tp).allocated * 8 == spec.cache_bytes(10).allocated * share
    assert spec.bytes_per_token(tp=tp) * 8 == spec.bytes_per_token() * share


def test_a_token_adds_to_the_largest_stage():
    spec = ModelSpec("test", 64, (*plain(3, 8, 2).layers, *plain(2, 8, 8, window=4).layers))
    one = 2 * 128 * 2
    assert spec.bytes_per_token(pp=2) == spec.bytes_per_token(at=3, pp=2) == (2 + 8 + 8) * one
    assert spec.bytes_per_token(at=4, pp=2) == 2 * one
    assert spec.bytes_per_token(pp=2, tp=4) == (1 + 2 + 2) * one
    with pytest.raises(ValueError, match="pp: got 6 for 5 layers"):
        spec.bytes_per_token(pp=6)


def test_pages_round_up():
    spec = plain(2, 4, 4, 16)
    one = spec.bytes_per_token()
    found = spec.cache_bytes(17, batch=3, page_size=16)
    assert (found.ideal, found.allocated, found.read_per_step) == (51 * one, 96 * one, 51 * one)
    assert found.tables == 2 * 3 * (5 + 2 * 4)
    assert spec.tokens_that_fit(96 * one, 3, page_size=16) == 32
    assert spec.tokens_that_fit(96 * one - 1, 3, page_size=16) == 16


def test_tables_are_a_length_and_a_flag_a_layer_and_sequence():
    assert plain(3, 4, 2, 16).cache_bytes(100, batch=7).tables == 3 * 7 * 5


def test_a_full_window_adds_no_bytes():
    sliding = plain(2, 4, 4, 16, window=8)
    assert sliding.bytes_per_token(at=7) == sliding.bytes_per_token() == 2 * 4 * 32 * 2
    assert sliding.bytes_per_token(at=8) == 0
    assert sliding.tokens_that_fit(sliding.cache_bytes(8).allocated) == math.inf
    assert sliding.tokens_that_fit(sliding.cache_bytes(8).allocated - 1) == 7


def test_no_budget_and_every_budget():
    spec = plain(1, 1, 1, 1)
    assert spec.tokens_that_fit(0) == 0
    assert spec.tokens_that_fit(math.inf) == math.inf


def test_intensity_is_the_group_at_two_bytes():
    for kv_heads in (1, 2, 4, 8):
        spec = plain(2, 8, kv_heads)
        assert spec.intensity("bf16") == 8 / kv_heads
        assert spec.intensity("f32") == 4 / kv_heads
        assert spec.intensity("fp8_e5m2", at=100) == 16 / kv_heads


def test_intensity_of_mixed_layers_follows_the_live_keys():
    mqa_in_a_window, mha = LayerSpec(8, 1, 64, 64, window=4), LayerSpec(8, 8, 64, 64)
    spec = ModelSpec("test", 512, (mqa_in_a_window, mha))
    assert spec.intensity() == pytest.approx(16 / 9)
    assert spec.intensity(at=10**6) == pytest.approx(1, rel=1e-4)


def test_floor_of_flash_decoding():
    """64k tokens of 2 KV heads of 128 in f16 over 2.039 TB/s: 32.9 us; 128k: 65.8 us."""
    spec = plain(1, 16, 2)
    for tokens, seconds in ((65_536, 32.9e-6), (131_072, 65.8e-6)):
        floor = spec.decode_floor("A100-80", tokens, weight_bytes=0, codec="f16")
        assert floor.seconds == pytest.approx(seconds, rel=1e-3)


def test_the_ceiling_that_binds():
    """MQA of 1024 query heads does 1024 FLOP/B: above every ridge."""
    spec = plain(1, 1024, 1)
    floor = spec.decode_floor(CHIPS["H100-SXM"], 1000, 4, weight_bytes=0)
    assert floor.binds == "matrix"
    assert floor.seconds == floor.ceilings["matrix"] == 4 * 2 * 1024 * 256 * 1000 / 989.5e12
    assert floor.ceilings["memory"] == 4 * 256 * 2 * 1000 / 3.35e12


def test_weights_cost_two_flop_each_and_are_read_once():
    spec = plain(1, 1, 1)
    small = spec.decode_floor("H200", 0, 1, weight_bytes=989.5e9)
    large = spec.decode_floor("H200", 0, 1000, weight_bytes=989.5e9)
    assert small.ceilings["memory"] == large.ceilings["memory"]
    assert large.binds == "matrix"
    assert large.seconds == pytest.approx(2 * 1000 * 989.5e9 / 2 / 989.5e12)
    in_int8 = spec.decode_floor("H200", 0, 1000, weight_bytes=989.5e9, weight_codec="int8")
    assert in_int8.seconds == pytest.approx(2 * large.seconds)


@pytest.mark.parametrize(
    ("spelling", "name", "itemsize"),
    [
        ("f32", "f32", 4),
        ("fp32", "f32", 4),
        ("bf16", "bf16", 2),
        ("f16", "f16", 2),
        ("fp16", "f16", 2),
        ("fp8", "fp8_e4m3", 1),
        ("fp8_e5m2", "fp8_e5m2", 1),
    ],
)
def test_casts(spelling, name, itemsize):
    assert codec(spelling) is CODECS[name]
    assert CODECS[name].itemsize == itemsize
    assert LayerSpec(4, 2, 5, 7).record_bytes(3, codec(name)) == 3 * 2 * 12 * itemsize


SPEC = plain(2, 8, 2)
SLIDING = plain(2, 8, 2, window=4)
CROSS = plain(1, 1, 1, 16, cross=True)
POOLED = plain(1, 1, 1, 16, pools=(Pool(4, 8),))
PROMPTED = plain(1, 1, 1, 16, prompt=3)
MAMBA = ModelSpec("test", 64, (state_layer(State("recurrent", 8)),))


class Whole:
    """A whole number that is not an int, as numpy's are not."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Unindexable:
    """An array of several numbers, which says that it is one until it is asked for it."""

    def __index__(self) -> int:
        raise TypeError("only length-1 arrays can be converted to Python scalars")

    def __repr__(self) -> str:
        return "an array"


def test_whole_numbers_of_any_kind_are_ints():
    placing = {"page_size": 4, "tp": 2, "pp": 2, "dp": 2, "source_tokens": 3, "in_flight": 2}
    of_a_kind = {name: Whole(value) for name, value in placing.items()}
    for spec in (SPEC, CROSS, MAMBA):
        given, kinds = (
            {**numbers, "pp": min(placing["pp"], len(spec.layers))}
            for numbers in (placing, of_a_kind)
        )
        assert spec.cache_bytes(Whole(9), Whole(4), **kinds) == spec.cache_bytes(9, 4, **given)
    assert SPEC.bytes_per_token(at=Whole(9)) == SPEC.bytes_per_token(at=9)
    assert SPEC.tokens_that_fit(10**6, Whole(4)) == SPEC.tokens_that_fit(10**6, 4)
    assert SPEC.decode_floor(
        "H200", Whole(9), Whole(4), weight_bytes=0, tp=Whole(2), source_tokens=Whole(3)
    ) == SPEC.decode_floor("H200", 9, 4, weight_bytes=0, tp=2, source_tokens=3)


def test_a_mix_with_empty_sequences_is_limited_by_the_others():
    token = SPEC.bytes_per_token()
    assert SPEC.tokens_that_fit(5 * token, (0.01, 0)) == 599
    assert SPEC.tokens_that_fit(5 * token, (0,)) == math.inf


def test_replicas_hold_as_many_sequences_each():
    budget = 5 * SPEC.cache_bytes(8).total
    assert SPEC.sequences_that_fit(budget, 8) == 5
    assert SPEC.sequences_that_fit(budget, 8, dp=3) == 15
    assert SPEC.cache_bytes(8, 15, dp=3).total <= budget < SPEC.cache_bytes(8, 16, dp=3).total


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: codec("int3"), "codec: got 'int3'; accepted: f32, bf16"),
        (lambda: SPEC.cache_bytes(-1), "tokens: got -1; accepted: a whole number, at least 0"),
        (lambda: SPEC.cache_bytes(1.5), "tokens: got 1.5"),
        (lambda: SPEC.cache_bytes(1, 0), "batch: got 0"),
        (lambda: SPEC.cache_bytes(1, tp=0), "tp: got 0"),
        (lambda: SPEC.cache_bytes(1, page_size=0), "page_size: got 0"),
        (
            lambda: SLIDING.cache_bytes(1, codec="kivi2"),
            "codec: got 'kivi2', whose scales are shared by 32 tokens, for a ring layout",
        ),
        (lambda: SPEC.cache_bytes(1, codec="kivi4", page_size=16), "codec: got 'kivi4'"),
        (lambda: SPEC.cache_bytes(1, definition="hf"), "definition: got 'hf'; accepted: kvjax, hf"),
        (
            lambda: SPEC.cache_bytes(1, page_size=16, definition="hf-static"),
            "page_size: got 16 with definition 'hf-static'; accepted: None",
        ),
        (
            lambda: SPEC.cache_bytes(1, codec="int8", definition="hf-dynamic"),
            "codec: got 'int8' with definition 'hf-dynamic'; accepted: f32, bf16, f16",
        ),
        (
            lambda: POOLED.cache_bytes(1, definition="hf-static"),
            "definition: got 'hf-static'; accepted for layers with compressed pools: kvjax, hf-d",
        ),
        (lambda: SPEC.cache_bytes(1, pp=3), "pp: got 3 for 2 layers"),
        (lambda: SPEC.cache_bytes(1, dp=0), "dp: got 0"),
        (lambda: SPEC.cache_bytes(1, in_flight=0), "in_flight: got 0"),
        (lambda: SPEC.cache_bytes(1, ring_multiple=0), "ring_multiple: got 0"),
        (lambda: SPEC.cache_bytes(1, source_tokens=-1), "source_tokens: got -1"),
        (lambda: SPEC.cache_bytes(1, ()), r"batch: got \(\); accepted: shares between 0 and 1"),
        (lambda: SPEC.cache_bytes(1, (0.5, 2)), r"batch: got \(0.5, 2\)"),
        (lambda: SPEC.sequences_that_fit(-1, 8), "budget_bytes: got -1"),
        (lambda: SPEC.sequences_that_fit(10, {}), "tokens: got {}; accepted: weights of 0 or more"),
        (lambda: SPEC.sequences_that_fit(10, {8: -1.0}), "tokens: got {8: -1.0}"),
        (
            lambda: CROSS.tokens_that_fit(9, source_tokens=10),
            "budget_bytes: got 9; accepted: at least 640",
        ),
        (lambda: MAMBA.intensity(), "intensity: test has no layer that attends"),
        (lambda: SPEC.bytes_per_token(at=-1), "at: got -1"),
        (lambda: SPEC.bytes_per_token(at="8"), "at: got '8'"),
        (lambda: codec(["bf16"]), r"codec: got \['bf16'\]; accepted: f32"),
        (lambda: SPEC.cache_bytes(1, "8"), "batch: got '8'; accepted: shares between 0 and 1"),
        (lambda: SPEC.cache_bytes(1, (0.5, math.nan)), r"batch: got \(0.5, nan\)"),
        (lambda: SPEC.cache_bytes(1, (0.5, "1")), r"batch: got \(0.5, '1'\)"),
        (lambda: SPEC.cache_bytes(1, tp=Unindexable()), "tp: got an array"),
        (lambda: SPEC.tokens_that_fit("8"), "budget_bytes: got '8'; accepted: 0 or more"),
        (lambda: SPEC.tokens_that_fit(math.inf, 0), "batch: got 0"),
        (lambda: PROMPTED.tokens_that_fit(9), "budget_bytes: got 9; .* a learned prompt"),
        (lambda: SPEC.sequences_that_fit(None, 8), "budget_bytes: got None"),
        (lambda: SPEC.sequences_that_fit(10, [8]), r"tokens: got \[8\]; accepted: a whole number"),
        (lambda: SPEC.sequences_that_fit(10, {8: math.inf}), "tokens: got {8: inf}"),
        (lambda: SPEC.sequences_that_fit(10, {8: "1"}), "tokens: got {8: '1'}"),
        (lambda: SPEC.decode_floor(["H200"], 1, weight_bytes=0), r"chip: got \['H200'\]"),
        (lambda: SPEC.decode_floor("H200", 1, (1,), weight_bytes=0), r"batch: got \(1,\)"),
        (lambda: SPEC.decode_floor("H200", 1, weight_bytes="8"), "weight_bytes: got '8'"),
        (
            lambda: SPEC.decode_floor("H200", 1, weight_bytes=0, weight_codec=["bf16"]),
            r"weights: got \['bf16'\]",
        ),
        (lambda: SPEC.intensity(at=0), "at: got 0"),
        (lambda: SPEC.tokens_that_fit(-1), "budget_bytes: got -1"),
        (lambda: SPEC.tokens_that_fit(math.nan), "budget_bytes: got nan"),
        (lambda: SPEC.decode_floor("H300", 1, weight_bytes=0), "chip: got 'H300'; accepted: A100"),
        (lambda: SPEC.decode_floor("H200", 1), "weights: the spec has none"),
        (lambda: SPEC.decode_floor("H200", 1, weight_bytes=-1), "weight_bytes: got -1"),
        (lambda: LayerSpec(8, 3, 64, 64), "kv_heads: got 3 for 8 query heads"),
        (lambda: LayerSpec(0, 1, 64, 64), "query_heads: got 0"),
        (lambda: LayerSpec(8, 8, 64.0, 64), "key_dim: got 64.0"),
        (lambda: LayerSpec(8, 8, 64, 64, window=0), "window: got 0"),
        (lambda: LayerSpec(8, 8, 64, 64, kind="mamba"), "kind: got 'mamba'"),
        (lambda: LayerSpec(8, 1, 64, 64, kind="latent"), "latent_rank: got 0"),
        (lambda: LayerSpec(8, 8, 64, 64, kind="factors", key_rank=2), "value_rank: got 0"),
        (lambda: LayerSpec(8, 8, 64, 64, window=4, chunk=4), "chunk: got 4 beside a window of 4"),
        (lambda: ModelSpec("test", 64, ()), "layers: got none"),
        (lambda: ModelSpec("test", 0, SPEC.layers), "d_model: got 0"),
        (
            lambda: ModelSpec("test", 64, (LayerSpec(8, 8, 64, 64, shares_with=0),)),
            r"layers\[0\].shares_with: got 0",
        ),
        (
            lambda: ModelSpec(
                "test", 64, (SPEC.layers[0], LayerSpec(8, 8, 128, 128, shares_with=0))
            ),
            r"layers\[1\].kv_heads: got 8; accepted: 2, as in layer 0",
        ),
    ],
)
def test_refusals_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
