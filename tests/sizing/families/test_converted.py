"""Models that kvjax converted to latent attention."""

import pytest

from kvjax import sizing
from kvjax.sizing import text

SOURCE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
}
CONFIG = {
    **SOURCE,
    "model_type": "kvjax_mla",
    "source_model_type": "llama",
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "rope_heads": 2,
    "rope_pairs": [[0, 1, 2, 0, 1, 2]] * 2,
}


def test_what_a_token_leaves_behind():
    spec = sizing.load(CONFIG)
    assert spec.model_type == "kvjax_mla"
    assert spec.bytes_per_token("bf16") == 2 * 2 * (24 + 2 * 6)
    assert spec.cache_bytes(100).ideal == 100 * 2 * 2 * (24 + 2 * 6)
    # Absorbed: scores over latent and rope keys, and values over the latent, 4 heads each.
    assert spec.attention_flop(10) == 2 * 2 * 4 * (24 + 12 + 24) * 10


def test_parameters():
    source, spec = sizing.load(SOURCE), sizing.load(CONFIG)
    q, down = 64 * 4 * (10 + 6), 64 * (24 + 2 * 6)
    up, o = 4 * 24 * (10 + 16), 4 * 16 * 64
    assert spec.attention_parameters == 2 * (q + down + up + o)
    rest = source.parameters - source.attention_parameters
    assert spec.parameters - spec.attention_parameters == rest > 0


def test_several_rope_keys_are_named():
    figures = sizing.report(sizing.load(CONFIG), 100)
    assert text.describe(figures["layers"][0]).endswith("1 latent of 24, rope key 2 × 6")
    figures = sizing.report(sizing.load({**CONFIG, "rope_heads": 1}), 100)
    assert text.describe(figures["layers"][0]).endswith("1 latent of 24, rope key 6")
    assert "rope_heads" not in figures["layers"][0]


def test_windows_stay():
    config = {**CONFIG, "source_model_type": "mistral", "sliding_window": 8}
    assert [layer.window for layer in sizing.load(config).layers] == [8, 8]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source_model_type": "kvjax_mla"}, "source_model_type: got 'kvjax_mla'; accepted"),
        ({"source_model_type": None}, "source_model_type: got None"),
        ({"kv_lora_rank": 0}, "kv_lora_rank: got 0"),
        ({"rope_heads": 3}, "rope_heads: got 3 for 4 query heads; accepted: a divisor"),
        ({"qk_nope_head_dim": -1}, "qk_nope_head_dim: got -1"),
        ({"v_head_dim": 8}, "v_head_dim: got 8; accepted for llama: absent"),
    ],
)
def test_fields_that_do_not_fit(fields, message):
    with pytest.raises(ValueError, match=message):
        sizing.load({**CONFIG, **fields})
