"""Figures that papers and kernels print and that follow by arithmetic alone."""

import dataclasses
import math

import pytest

from kvjax import sizing
from kvjax.sizing.layer import LayerSpec


def model(layer: LayerSpec, depth: int = 1, width: int = 4096) -> sizing.ModelSpec:
    return sizing.ModelSpec("figure", width, (layer,) * depth)


def mha(heads: int, width: int) -> LayerSpec:
    return LayerSpec(heads, heads, width, width)


def gqa(query_heads: int, kv_heads: int, width: int) -> LayerSpec:
    return LayerSpec(query_heads, kv_heads, width, width)


def latents(query_heads: int, count: int, rank: int, rope: int) -> LayerSpec:
    """MLA with one latent, GLA with several."""
    return LayerSpec(
        query_heads, count, 128 + rope, 128, kind="latent", latent_rank=rank, rope_dim=rope
    )


MLA = latents(128, 1, 512, 64)


# --- DeepSeek-V2 and V3 (2405.04434, 2412.19437); FlashMLA's and TensorRT-LLM's cache formats


@pytest.mark.parametrize(
    ("codec", "nbytes"), [("bf16", 70_272), ("fp8_ds_mla", 40_016), ("nvfp4", 21_472)]
)
def test_deepseek_v3_bytes_per_token(codec, nbytes):
    assert model(MLA, 61).bytes_per_token(codec) == nbytes


@pytest.mark.parametrize(
    ("layer", "depth", "elements"),
    [
        (mha(16, 128), 27, 110_592),
        (latents(16, 1, 512, 64), 27, 15_552),
        (mha(56, 128), 60, 860_160),
        (latents(56, 1, 512, 64), 60, 34_560),
    ],
)
def test_deepseek_v2_table_9_elements_per_token(layer, depth, elements):
    assert model(layer, depth).bytes_per_token() / 2 == elements


def test_deepseek_v2_s_93_percent_is_6_bit_against_bf16():
    v2, dense_67b = model(MLA, 60), model(gqa(64, 8, 128), 95)
    elements = v2.bytes_per_token() / 2

    assert 1 - elements * 6 / 8 / dense_67b.bytes_per_token() == pytest.approx(0.9334, abs=5e-5)
    assert 1 - v2.bytes_per_token() / dense_67b.bytes_per_token() == pytest.approx(0.8224, abs=5e-5)
    own_heads = model(mha(128, 128), 60)
    assert 1 - v2.bytes_per_token() / own_heads.bytes_per_token() == pytest.approx(0.9824, abs=5e-5)


def test_mla_is_gqa_with_two_and_a_quarter_groups():
    one_group = model(gqa(128, 1, 128)).bytes_per_token()
    assert model(MLA).bytes_per_token() / one_group == 2.25


# --- Cross-layer attention (2405.12981), Table 1: 20 layers of a 1B model, bytes a token


def shared(kv_heads: int, width: int, producers: list[int]) -> sizing.ModelSpec:
    """20 layers, each reading the records of the nearest producer at or before it."""
    kept = LayerSpec(kv_heads, kv_heads, width, width)
    layers = []
    for index in range(20):
        source = max(producer for producer in producers if producer <= index)
        reads = None if source == index else source
        layers.append(dataclasses.replace(kept, shares_with=reads))
    return sizing.ModelSpec("cla", 2048, tuple(layers))


EVERY = list(range(20))
PAIRS = list(range(0, 20, 2))
CLA = [
    ("H128-MHA", 16, 128, EVERY, 163_840),
    ("H128-GQA4", 4, 128, EVERY, 40_960),
    ("H128-GQA2", 2, 128, EVERY, 20_480),
    ("H128-MQA", 1, 128, EVERY, 10_240),
    ("H46-MQA", 1, 46, EVERY, 3_680),
    ("H128-MQA-CLA2", 1, 128, PAIRS, 5_120),
    ("H90-MQA-CLA2", 1, 90, PAIRS, 3_600),
    ("H64-MQA-CLA2", 1, 64, PAIRS, 2_560),
    ("H128-MQA-CLA3", 1, 128, list(range(0, 20, 3)), 3_584),
    ("H128-MQA-CLA4", 1, 128, list(range(0, 20, 4)), 2_560),
    ("H128-MQA-CLA2-KeepEnds", 1, 128, [0, *range(1, 19, 2), 19], 5_632),
]


@pytest.mark.parametrize(
    ("kv_heads", "width", "producers", "nbytes"), [row[1:] for row in CLA], ids=[r[0] for r in CLA]
)
def test_cla_table_1(kv_heads, width, producers, nbytes):
    assert shared(kv_heads, width, producers).bytes_per_token() == nbytes


def test_sharing_saves_capacity_and_no_reads():
    alone, pairs = shared(1, 128, EVERY), shared(1, 128, PAIRS)
    assert pairs.cache_bytes(1000).read_per_step == alone.cache_bytes(1000).read_per_step


# --- GTA and GLA (2505.21487), Table of the XL model: 16 heads of 128, a layer, by shards


@pytest.mark.parametrize(
    ("layer", "one", "two"),
    [
        (latents(16, 2, 256, 64), 1152, 640),
        (LayerSpec(16, 4, 128, 128, kind="tied", rope_dim=64), 1152, 640),
        (latents(16, 1, 512, 64), 1152, 1152),
        (gqa(16, 4, 128), 2048, 1024),
    ],
    ids=["GLA-2", "GTA-4", "MLA", "GQA-4"],
)
def test_gla_and_gta_bytes_per_token_on_one_and_two_shards(layer, one, two):
    spec = model(layer)
    assert (spec.bytes_per_token(), spec.bytes_per_token(tp=2)) == (one, two)


# --- TPA (2501.06425), section 3: factors of a token


@pytest.mark.parametrize(("key_rank", "value_rank"), [(2, 2), (1, 2), (16, 1)])
def test_tpa_elements_per_token(key_rank, value_rank):
    heads, width = 47, 64
    layer = LayerSpec(
        *(heads, 1, width, width), kind="factors", key_rank=key_rank, value_rank=value_rank
    )
    elements = (key_rank + value_rank) * (heads + width)
    assert model(layer).bytes_per_token() / 2 == elements


# --- Pope et al. 2022 (2211.05102): PaLM-540B, 118 layers, on 64 TPU v4


TPU_V4 = sizing.CHIPS["TPU-v4"]
# 48 heads padded to the 64 chips; one KV head of 256 is on every chip.
PALM_MULTIHEAD = model(mha(64, 128), 118)
PALM_MULTIQUERY = model(gqa(64, 1, 256), 118)


@pytest.mark.parametrize(
    ("spec", "placing", "batch", "tokens", "paper"),
    [
        (PALM_MULTIHEAD, {"tp": 64}, 128, 1_332, 1_320),
        (PALM_MULTIQUERY, {"tp": 64}, 128, 666, 660),
        (PALM_MULTIQUERY, {"dp": 64}, 128, 42_653, 43_000),
        (PALM_MULTIHEAD, {"tp": 64}, 512, 333, 330),
        (PALM_MULTIQUERY, {"tp": 64}, 512, 166, 165),
        (PALM_MULTIQUERY, {"dp": 64}, 512, 10_663, 10_700),
    ],
)
def test_pope_table_1_longest_context(spec, placing, batch, tokens, paper):
    fits = spec.tokens_that_fit(0.3 * TPU_V4.memory_bytes, batch, **placing)
    assert fits == tokens
    assert fits == pytest.approx(paper, rel=0.01)


def test_pope_multihead_cache_of_3_terabytes():
    spec = model(mha(48, 128), 118)
    assert spec.cache_bytes(2048, 512).allocated == pytest.approx(3.04e12, rel=2e-3)


# --- KIVI (2402.02750): 2 bits, groups of 32, 128 newest tokens in 16 bits


LLAMA_2_7B = model(mha(32, 128), 32)


@pytest.mark.parametrize(
    ("tokens", "allocated", "ideal"),
    [(499, 2.53, 2.595), (4096, 4.70, 4.995), (32_768, 5.24, 5.289)],
)
def test_kivi_2_is_so_much_smaller(tokens, allocated, ideal):
    plain, kivi = (LLAMA_2_7B.cache_bytes(tokens, codec=codec) for codec in ("bf16", "kivi2"))
    assert plain.allocated / kivi.allocated == pytest.approx(allocated, abs=0.005)
    assert plain.ideal / kivi.ideal == pytest.approx(ideal, abs=0.0005)


def test_kivi_2_takes_three_bits_a_number():
    assert LLAMA_2_7B.bytes_per_token("kivi2") / LLAMA_2_7B.bytes_per_token() == 3 / 16


# --- Kernels


def test_flash_mla_s_ridge_in_query_rows():
    # FlashMLA counts 865 TFLOP/s reached on an H100 SXM; a query row of one head and token does
    # about two FLOP for each of a latent's two bytes, twice: as key and as value.
    per_row = model(latents(1, 1, 512, 64)).intensity()
    rows = 865e12 / sizing.CHIPS["H100-SXM"].bytes_per_second / 2
    assert rows == pytest.approx(129, abs=0.5)
    assert per_row == pytest.approx(2, rel=0.06)


@pytest.mark.parametrize(
    ("tokens", "microseconds", "measured", "share"),
    [(65_536, 32.9, 64.4, 0.51), (131_072, 65.8, 106.6, 0.62)],
)
def test_flash_decoding_s_floor(tokens, microseconds, measured, share):
    spec = model(gqa(16, 2, 128))
    floor = spec.decode_floor("A100-80", tokens, weight_bytes=0)
    assert floor.binds == "memory"
    assert floor.seconds * 1e6 == pytest.approx(microseconds, abs=0.05)
    assert floor.seconds * 1e6 / measured == pytest.approx(share, abs=0.006)
    assert math.isclose(spec.cache_bytes(65_536).read_per_step, 67.1e6, rel_tol=1e-3)
