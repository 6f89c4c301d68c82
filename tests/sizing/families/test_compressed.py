"""DeepSeek-V4's windows of tied heads and pools of compressed entries, worked out by hand."""

import pytest

from kvjax import sizing

V4 = {
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4],
    "torch_dtype": "bfloat16",
}


def test_deepseek_v4_flash_as_transformers_holds_it():
    held = sizing.load(V4).cache_bytes(8192, definition="hf-dynamic")
    assert held.allocated == 43 * 127 * 512 * 2 * 2 == 11_184_128
    assert held.state == 56_683_520


def test_deepseek_v4_keeps_its_tied_head_once():
    held = sizing.load(V4).cache_bytes(8192)
    pools = 21 * 2048 * (512 + 128) + 20 * 64 * 512
    assert held.allocated == (43 * 128 * 512 + pools) * 2
    # 21 layers keep two pairs a token for 4 tokens and one of the entry before, gates of it in f32;
    # 20 layers keep one pair for 128 tokens.
    sparse = (512 + 128) * 4 * (4 * 2 + 2 + 4)
    assert held.state == 21 * sparse + 20 * 128 * 512 * 2 * 2


def test_deepseek_v4_reads_what_its_index_picks():
    spec = sizing.load(V4)
    sparse = spec.layers[2]
    read = spec.cache_bytes(8192).read_per_step
    windows, index = 43 * 128 * 512, 21 * 2048 * 128
    assert read == (windows + index + 21 * 512 * 512 + 20 * 64 * 512) * 2
    assert sparse.attention_flop(8192) == sparse.decode_flop(128 + 512)


def test_ratios_of_layers_beyond_the_depth_do_not_matter():
    assert sizing.load({**V4, "compress_ratios": [*V4["compress_ratios"], 0]}) == sizing.load(V4)


def ratios(**fields) -> list[tuple[int, ...]]:
    config = {name: value for name, value in V4.items() if name != "compress_ratios"}
    spec = sizing.load({**config, "num_hidden_layers": 4, **fields})
    return [tuple(pool.ratio for pool in layer.pools) for layer in spec.layers]


def test_layers_of_deepseek_v4_by_each_of_its_fields():
    assert ratios() == [(128,), (128,), (128,), (4, 4)]
    assert ratios(compress_ratios=[0, 4, 128, 4]) == [(), (4, 4), (128,), (4, 4)]
    assert ratios(compress_ratios=[0, 4, 128, 4], compress_rate_csa=3, compress_rate_hca=10) == [
        *((), (3, 3), (10,), (3, 3))
    ]
    rates = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 64}
    assert ratios(compress_rates=rates) == [(64,), (64,), (64,), (8, 8)]
    assert ratios(compress_rates=rates, compress_rate_csa=2) == [(64,), (64,), (64,), (2, 2)]
    named = ["sliding_attention", "compressed_sparse_attention"] * 2
    assert ratios(layer_types=named, compress_ratios=[128] * 4) == [(), (4, 4), (), (4, 4)]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"compress_ratios": [0, 4, 8, 4]}, "compress_ratios: got 8"),
        ({"compress_ratios": [0, 4]}, "compress_ratios: got 2 items"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types: got 'full_attention'"),
        ({"compress_rates": {}}, "heavily_compressed_attention: absent"),
    ],
)
def test_other_pools_are_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        ratios(**fields)


def test_gates_of_a_whole_model_cast_are_cast_too():
    kept = sizing.load({**V4, "torch_dtype": None}).cache_bytes(8192, definition="hf-dynamic")
    loaded = sizing.load(V4).cache_bytes(8192, definition="hf-dynamic")
    assert loaded.state - kept.state == 21 * 4 * (512 + 128) * 2


def test_expanding_leaves_other_layers_alone():
    spec = sizing.load(V4)
    assert spec.expanded() == spec
