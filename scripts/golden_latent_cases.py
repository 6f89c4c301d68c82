"""The models of tests/golden with latent attention (MLA)."""

from __future__ import annotations

from typing import Any

import torch
from golden_cases import SHAPE_64, YARN, Case

# Widths that all differ, so that none can stand for another.
LATENT: dict[str, Any] = {
    **SHAPE_64,
    "hidden_size": 32,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
# Both lengths of DeepSeek's YaRN: its temperature is that of the scores, and not of RoPE.
DEEPSEEK_YARN = {
    **YARN,
    "type": "yarn",
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}

CASES = {
    "deepseek_v2_lite": Case(
        "deepseek_v2",
        {**LATENT, **EXPERTS, "q_lora_rank": None, "n_shared_experts": 2},
        dtype=torch.bfloat16,
        max_shard_size="25KB",
        shows="latent attention; queries from the input; 3 of 8 experts beside 2 shared ones after "
        "a dense layer; bf16 in several shards",
    ),
    "deepseek_v2_groups": Case(
        "deepseek_v2",
        {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "rope_scaling": {**DEEPSEEK_YARN, "mscale": 1.0},
            "rms_norm_eps": 1e-2,
        },
        tokens=44,
        dtype=torch.bfloat16,
        shows="queries by way of a rank; biases; experts of 2 of 4 groups; YaRN over its original "
        "length, its temperature shared by RoPE and scores",
    ),
    "deepseek_v3_groups": Case(
        "deepseek_v3",
        {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "rope_scaling": {**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        tokens=44,
        dtype=torch.bfloat16,
        shows="scores of experts by sigmoids, their choice corrected; YaRN over its original "
        "length, its temperature that of the scores",
    ),
    "deepseek_v3_one_group": Case(
        "deepseek_v3",
        {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
        },
        dtype=torch.bfloat16,
        shows="queries from the input; one group; weights of experts not normed; biases",
    ),
    "minicpm3_longrope": Case(
        "minicpm3",
        {
            **LATENT,
            "q_lora_rank": 24,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.5, 2.0, 4.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
                "original_max_position_embeddings": 64,
            },
            "dim_model_base": 8,
        },
        dtype=torch.bfloat16,
        shows="halves rotated; LongRoPE up to its original length; embeddings, sub-layers and "
        "logits scaled; tied by default",
    ),
    "minicpm3_unscaled": Case(
        "minicpm3",
        {
            **LATENT,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "v_head_dim": None,
            "q_lora_rank": 24,
            "scale_emb": 2,
            "scale_depth": None,
            "dim_model_base": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_scaling": DEEPSEEK_YARN,
        },
        tokens=44,
        dtype=torch.bfloat16,
        shows="values as wide as hidden / heads; a head; biases; YaRN over its original length",
    ),
}
