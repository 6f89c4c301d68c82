"""The models of tests/golden whose layers are mixtures of experts, separately stored."""

from __future__ import annotations

import torch
from golden_cases import SHAPE_32, SHAPE_64, Case

CASES = {
    "mixtral_gqa": Case(
        "mixtral",
        {
            **SHAPE_32,
            "intermediate_size": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rms_norm_eps": 1e-2,
        },
        dtype=torch.bfloat16,
        max_shard_size="25KB",
        shows="grouped; 3 of 6 experts, each in tensors of its own, in several shards",
    ),
    "mixtral_window": Case(
        "mixtral",
        {
            **SHAPE_64,
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_key_value_heads": 2,
            "num_local_experts": 5,
            "sliding_window": 6,
            "rope_theta": 5000.0,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
        },
        tokens=44,
        dtype=torch.bfloat16,
        shows="windows of 6; 2 of 5 experts by default, their gates by gelu; tied",
    ),
    "qwen3_moe_dense_between": Case(
        "qwen3_moe",
        {
            **SHAPE_32,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 12,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        dtype=torch.bfloat16,
        shows="2 of 6 experts, their weights normed; a dense layer between, by `mlp_only_layers`",
    ),
    "qwen3_moe_window": Case(
        "qwen3_moe",
        {
            **SHAPE_32,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "moe_intermediate_size": 12,
            "num_experts": 9,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
        },
        tokens=44,
        dtype=torch.bfloat16,
        shows="windows of 7 in all layers; 8 of 9 experts by default, their weights not normed, in "
        "layer 1 by `decoder_sparse_step` and `mlp_only_layers`; biases",
    ),
}
