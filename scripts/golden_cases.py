"""The tiny models of tests/golden, as data: `scripts/make_golden.py` makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

VOCAB = 96
SHAPE_64 = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SHAPE_32 = {**SHAPE_64, "hidden_size": 32, "head_dim": 16, "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@dataclass(frozen=True)
class Case:
    """One model: its config in the spelling of transformers 4, and how it is stored."""

    model_type: str
    config: dict[str, Any]
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "1GB"
    tokens: int = 24
    shows: str = field(kw_only=True)  # for the README


CASES = {
    "llama_mha": Case(
        "llama",
        {**SHAPE_64, "head_dim": 24, "intermediate_size": 64},
        max_shard_size="50KB",
        shows="head_dim is not hidden / heads; 8 shards, one layer's q_proj and k_proj apart",
    ),
    "llama_gqa_tied": Case(
        "llama",
        {**SHAPE_64, "num_key_value_heads": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
        dtype=torch.bfloat16,
        max_shard_size="25KB",
        shows="grouped; tied embeddings, no lm_head; bf16 in 5 shards",
    ),
    "llama_bias": Case(
        "llama",
        {**SHAPE_32, "attention_bias": True, "mlp_bias": True},
        shows="biases on all projections",
    ),
    "llama_linear": Case(
        "llama",
        {
            **SHAPE_32,
            "rope_theta": 500000.0,
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
        dtype=torch.bfloat16,
        shows="linear RoPE scaling, spelled `type`",
    ),
    "llama_llama3": Case(
        "llama",
        {**SHAPE_32, "rope_theta": 50000.0, "rope_scaling": LLAMA3},
        tokens=40,
        dtype=torch.bfloat16,
        shows="llama3 RoPE scaling",
    ),
    "llama_yarn": Case(
        "llama",
        {**SHAPE_32, "rope_theta": 50000.0, "rope_scaling": YARN},
        tokens=40,
        dtype=torch.bfloat16,
        shows="YaRN RoPE scaling",
    ),
    "llama_yarn_tuned": Case(
        "llama",
        {
            **SHAPE_32,
            "rope_scaling": {
                **YARN,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
                "mscale": 0.7,
                "mscale_all_dim": 0.4,
                "truncate": False,
            },
        },
        tokens=40,
        dtype=torch.bfloat16,
        shows="YaRN with every optional field",
    ),
    "mistral_gqa": Case(
        "mistral",
        {**SHAPE_32, "sliding_window": None, "rope_theta": 1e6},
        dtype=torch.float16,
        shows="grouped; full attention; f16",
    ),
    "qwen2_mha": Case(
        "qwen2",
        {**SHAPE_64, "num_key_value_heads": 4},
        dtype=torch.bfloat16,
        shows="biases on q, k, v and none on o",
    ),
    "qwen2_gqa": Case(
        "qwen2",
        {**SHAPE_64, "num_key_value_heads": 2, "tie_word_embeddings": True},
        dtype=torch.bfloat16,
        shows="grouped; tied; bf16",
    ),
    "qwen3_mha": Case(
        "qwen3",
        {**SHAPE_64, "head_dim": 32, "num_key_value_heads": 4},
        dtype=torch.bfloat16,
        shows="q and k normed per head; head_dim 32 is not hidden / heads",
    ),
    "qwen3_gqa": Case(
        "qwen3",
        {
            **SHAPE_32,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
        },
        dtype=torch.bfloat16,
        shows="grouped, with biases",
    ),
    "gemma_mqa": Case(
        "gemma",
        {**SHAPE_64, "head_dim": 24, "num_key_value_heads": 1, "hidden_act": "gelu"},
        dtype=torch.bfloat16,
        shows="one KV head; `gelu` means its tanh form here; tied by default",
    ),
    "phi3_fused": Case(
        "phi3",
        {**SHAPE_64, "num_key_value_heads": 2, "pad_token_id": 0},
        dtype=torch.bfloat16,
        shows="fused [q; k; v] and [gate; up]",
    ),
    "phi3_partial_rotary": Case(
        "phi3",
        {
            **SHAPE_64,
            "num_hidden_layers": 1,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "pad_token_id": 0,
        },
        dtype=torch.bfloat16,
        shows="12 of 16 channels rotated",
    ),
    "olmo2_mha": Case(
        "olmo2", SHAPE_64, dtype=torch.bfloat16, shows="norms after; q and k normed at full width"
    ),
    "olmo2_gqa": Case(
        "olmo2",
        {
            **SHAPE_64,
            "hidden_size": 32,
            "num_key_value_heads": 2,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-2,
        },
        dtype=torch.float16,
        shows="grouped",
    ),
    "gpt2_conv1d": Case(
        "gpt2",
        {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "vocab_size": VOCAB,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 64,
            "n_positions": 48,
        },
        shows="weights stored (in, out), two of them square; learned positions",
    ),
    "gpt2_by_layer": Case(
        "gpt2",
        {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 32,
            "activation_function": "relu",
            "scale_attn_by_inverse_layer_idx": True,
            "layer_norm_epsilon": 1e-2,
        },
        dtype=torch.float16,
        shows="n_inner left out; scores scaled by layer",
    ),
    "gpt_neox_interleaved": Case(
        "gpt_neox",
        {**SHAPE_64, "rotary_pct": 0.5, "rotary_emb_base": 5000},
        shows="[q; k; v] of each head interleaved; parallel residual; half of the channels rotated",
    ),
    "gpt_neox_sequential": Case(
        "gpt_neox",
        {
            **SHAPE_64,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "use_parallel_residual": False,
            "attention_bias": False,
            "layer_norm_eps": 1e-2,
        },
        dtype=torch.float16,
        shows="sequential residual; a quarter of the channels rotated; no attention biases",
    ),
}
