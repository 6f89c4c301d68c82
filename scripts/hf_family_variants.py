"""More tiny models of a family, where its fields change the cache: for measure_hf_caches.py.

By model type: the variant's name to a note and to fields over those of hf_family_overrides.py, with
`...` for a field that is left to its default.
"""

from __future__ import annotations

from typing import Any

Variants = dict[str, tuple[str, dict[str, Any]]]

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
NO_GROUPS: Variants = {"kv absent": ("num_key_value_heads left out", {"num_key_value_heads": ...})}
NO_HEAD_DIM: Variants = {"head_dim absent": ("head_dim left out", {"head_dim": ...})}
NO_WINDOW: Variants = {"no window": ("sliding_window null", {"sliding_window": None})}
WINDOW: Variants = {"window": ("sliding_window 8 on every layer", {"sliding_window": 8})}
ALL_FULL: Variants = {
    "full": ("every layer full", {"layer_types": [FULL] * 4, "num_hidden_layers": 4})
}
FROM_LAYER_2: Variants = {
    "window": (
        "use_sliding_window, sliding_window 8, max_window_layers 2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "window unused": ("sliding_window 8, use_sliding_window false", {"sliding_window": 8}),
    "window by list": (
        "layer_types alone says which layers have the window",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": [SLIDING, FULL, FULL, SLIDING],
            "num_hidden_layers": 4,
        },
    ),
}
DIRECT_QUERIES: Variants = {"direct queries": ("q_lora_rank null", {"q_lora_rank": None})}
DECODER: Variants = {
    "decoder": ("the decoder alone", {"is_encoder_decoder": False, "is_decoder": True}),
}
CROSS_ATTENTION: Variants = {
    "cross": ("attends to 17 vectors of an encoder", {"add_cross_attention": True}),
}

GIVES_HEAD_DIM = {"head_dim": 16, "linear_head_dim": ..., "linear_num_heads": ...}

VARIANTS: dict[str, Variants] = {
    "afmoe": {
        "every second": ("as loaded", {"global_attn_every_n_layers": 2}),
        **ALL_FULL,
    },
    "bamba": {"groups": ("one group of B and C", {"mamba_n_groups": 1, "mamba_d_conv": 3})},
    "bart": DECODER,
    "bert": CROSS_ATTENTION,
    "bailing_hybrid": {
        "linear width": ("head_dim 16 is that of the linear layers", GIVES_HEAD_DIM),
        "linear width as given": ("the same, before it is loaded", GIVES_HEAD_DIM),
        "query rank": ("q_lora_rank 32", {"q_lora_rank": 32}),
        "all linear but last": ("layer_types given", {"layer_types": [LINEAR] * 3 + [FULL]}),
    },
    "bigbird_pegasus": DECODER,
    "blenderbot": DECODER,
    "cohere2": {
        "pattern": ("sliding_window_pattern 2, before layer_types", {"sliding_window_pattern": 2}),
        **ALL_FULL,
    },
    "cohere2_moe": ALL_FULL,
    "cwm": ALL_FULL,
    "dbrx": {"kv absent": ("one KV head by default", {"attn_config": {"kv_n_heads": ...}})},
    "deepseek_v2": DIRECT_QUERIES,
    "deepseek_v3": DIRECT_QUERIES,
    "deepseek_v4": {
        "default layers": ("layer_types left out", {"layer_types": ..., "num_hidden_layers": 5}),
        "rates": ("other compression rates", {"compress_rates": {CSA: 2, HCA: 16}}),
        "ratios": (
            "compress_ratios, as published",
            {
                "layer_types": ...,
                "compress_rates": ...,
                "compress_ratios": [0, 0, 4, 128, 4],
                "num_hidden_layers": 5,
            },
        ),
    },
    "dory": {
        "last loop": ("keeps the last loop only", {"recurrent_kv_cache_mode": "last_loop"}),
        "three loops": ("n_recurrent_loops 3", {"n_recurrent_loops": 3}),
    },
    "dots1": {
        "window": (
            "use_sliding_window, sliding_window 8, max_window_layers 2",
            {"max_window_layers": 2},
        )
    },
    "dots3_note_text": {
        "no index": ("use_dsa false", {"use_dsa": False}),
        "no window": ("use_sliding_window false", {"use_sliding_window": False}),
    },
    "exaone4": {
        "no window": ("as EXAONE 4 1.2B", {"sliding_window": None, "layer_types": [FULL] * 4}),
        "pattern": ("sliding_window_pattern 2", {"sliding_window_pattern": 2}),
    },
    "exaone_moe": {"pattern": ("sliding_window_pattern 2", {"sliding_window_pattern": 2})},
    "falcon": {
        "mha": ("multi_query false", {"multi_query": False}),
        "alibi": ("as Falcon-RW", {"multi_query": False, "alibi": True}),
        "mqa with num_kv_heads": ("multi_query wins", {"multi_query": True, "num_kv_heads": 2}),
        "new": ("as Falcon-40B", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        "new without num_kv_heads": ("one KV head each", {"new_decoder_architecture": True}),
    },
    "falcon_h1": {
        "expand": (
            "mamba_d_ssm null, so mamba_expand counts",
            {"mamba_d_ssm": None, "mamba_expand": 2},
        ),
        "conv": ("mamba_d_conv 3, one group", {"mamba_d_conv": 3, "mamba_n_groups": 1}),
    },
    "flint": {"six": ("six layers", {"num_hidden_layers": 8})},
    "gemma2": {**NO_HEAD_DIM, **ALL_FULL},
    "gemma3_text": {
        "pattern": ("sliding_window_pattern 2, before layer_types", {"sliding_window_pattern": 2}),
        "two ways": ("halves its window", {"use_bidirectional_attention": True}),
        **ALL_FULL,
    },
    "gemma3n_text": {"no sharing": ("num_kv_shared_layers 0", {"num_kv_shared_layers": 0})},
    "gemma4_text": {
        "no sharing": ("num_kv_shared_layers 0", {"num_kv_shared_layers": 0}),
        "k is v": (
            "attention_k_eq_v",
            {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0},
        ),
        "global heads unused": (
            "num_global_key_value_heads without attention_k_eq_v",
            {"num_global_key_value_heads": 1},
        ),
        "fields": (
            "global_head_dim as given, before per_layer_config",
            {"num_global_key_value_heads": 1, "attention_k_eq_v": True},
        ),
        "two ways": ("halves its window", {"use_bidirectional_attention": "all"}),
    },
    "glm4_moe": {"plain": ("head_dim 16", {"head_dim": 16})},
    "glm4_moe_lite": DIRECT_QUERIES,
    "glm_moe_dsa": {
        "frequency": (
            "index_topk_freq 2, before indexer_types",
            {"index_topk_freq": 2, "num_hidden_layers": 6},
        ),
        "pattern": ("index_topk_pattern", {"index_topk_pattern": "FSSF"}),
    },
    "gpt2": CROSS_ATTENTION,
    "gpt_bigcode": {"mha": ("multi_query false", {"multi_query": False})},
    "gpt_neo": {"local": ("every layer local", {"attention_types": [[["local"], 4]]})},
    "gpt_oss": {**ALL_FULL, **NO_HEAD_DIM},
    "granitemoehybrid": {
        "full": ("every layer full", {"layer_types": [FULL] * 4}),
        "older names": ("mamba and attention", {"layer_types": ["mamba", "attention"] * 2}),
    },
    "hrm_text": {"cycles": ("one slow cycle of two", {"H_cycles": 1, "L_cycles": 2})},
    "hy_v4": {
        "full": ("every indexer its own", {"indexer_types": ["full"] * 4}),
    },
    "inkling_text": {
        "local ids": (
            "local_layer_ids instead of layer_types",
            {"local_layer_ids": [0, 2], "num_hidden_layers": 4},
        ),
        "kernel": ("conv_kernel_size 3", {"conv_kernel_size": 3, "swa_num_key_value_heads": 2}),
    },
    "inkling2_loop": {
        "loops": ("loop_config, two passes", {"text_config": {"loop_config": {"num_passes": 2}}})
    },
    "jamba": {
        "period": (
            "every second layer attends",
            {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_conv": 3},
        ),
    },
    "kimi_linear": {
        "linear_attn_config": (
            "as published: one-based lists",
            {
                "linear_attn_config": {
                    "full_attn_layers": [2, 4],
                    "kda_layers": [1, 3],
                    "head_dim": 16,
                    "num_heads": 2,
                    "short_conv_kernel_size": 3,
                },
                "num_hidden_layers": 4,
            },
        ),
    },
    "laguna": {"full": ("layer_types left out", {"layer_types": ...})},
    "lara_mini": {"plain": ("eight layers", {"num_hidden_layers": 8})},
    "lfm2": {
        "types": (
            "layer_types given, conv_L_cache 4",
            {"layer_types": ["conv", FULL, "conv", "conv"], "conv_L_cache": 4},
        ),
        "no conv": ("full_attn_idxs left out", {"full_attn_idxs": ...}),
    },
    "llama": {**NO_GROUPS, **NO_HEAD_DIM},
    "llama4_text": {
        "no chunks": ("attention_chunk_size null", {"attention_chunk_size": None}),
        "interval": ("no_rope_layer_interval 2", {"no_rope_layer_interval": 2}),
        "rope list": ("no_rope_layers given", {"no_rope_layers": [0, 1, 1, 0]}),
    },
    "mamba": {"width": ("intermediate_size 96", {"intermediate_size": 96})},
    "mamba2": {"kernel": ("conv_kernel 3, one group", {"conv_kernel": 3, "n_groups": 1})},
    "mbart": DECODER,
    "mimo_v2_flash": {
        "size": ("sliding_window_size is one less", {"sliding_window_size": 8}),
    },
    "minimax": {
        "types": ("one full layer", {"layer_types": [LINEAR, LINEAR, LINEAR, FULL]}),
    },
    "minimax_m3_vl_text": {
        "sparse": (
            "sparse layers keep idx_keys, counted as state",
            {
                "layer_types": [FULL, "minimax_m3_sparse"] * 2,
                "index_head_dim": 16,
                "index_block_size": 4,
                "index_topk_blocks": 2,
            },
        ),
    },
    "ministral": {"mixed": ("layer_types given", {"layer_types": [FULL, SLIDING] * 2})},
    "mistral": {**NO_WINDOW, "window absent": ("4096 by default", {"sliding_window": ...})},
    "mistral_large4": {
        "sharing": (
            "layers that read another's latent",
            {
                "text_config": {
                    "kv_source_layers": [0, 1, 1, 3],
                    "indexer_types": ["full", "full", "shared", "full"],
                }
            },
        ),
        "shared indexers": (
            "indexers shared, latents not",
            {"text_config": {"indexer_types": ["full", "shared", "shared", "full"]}},
        ),
    },
    "mixtral": WINDOW,
    "mllama": {"image": ("attends to 17 vectors of an image", {})},
    "modernbert-decoder": {
        "every second": ("global_attn_every_n_layers 2", {"global_attn_every_n_layers": 2}),
    },
    "mpt": {
        "mqa": ("multiquery", {"attn_config": {"attn_type": "multiquery_attention"}}),
    },
    "nemotron_h": {
        "pattern": (
            "hybrid_override_pattern, as published",
            {"layers_block_type": ..., "hybrid_override_pattern": "M-M*-ME"},
        ),
        "one group": ("n_groups 1, conv_kernel 3", {"n_groups": 1, "conv_kernel": 3}),
    },
    "olmo3": ALL_FULL,
    "olmo_hybrid": {
        "widths": (
            "widths of the linear heads left out",
            {"linear_key_head_dim": ..., "linear_value_head_dim": ...},
        ),
    },
    "opt": {"projected": ("word_embed_proj_dim 32", {"word_embed_proj_dim": 32})},
    "pegasus": DECODER,
    "phi": NO_GROUPS,
    "phi3": {**WINDOW, **NO_GROUPS},
    "phimoe": WINDOW,
    "qwen2": FROM_LAYER_2,
    "qwen2_moe": FROM_LAYER_2,
    "qwen3": {**FROM_LAYER_2, **NO_HEAD_DIM},
    # Its masks know one window for all layers, so that layers may not differ.
    "qwen3_moe": {
        "window": ("a window of 8", {"use_sliding_window": True, "sliding_window": 8}),
        "window unused": FROM_LAYER_2["window unused"],
        **NO_HEAD_DIM,
    },
    "qwen3_next": {
        "interval": ("full_attention_interval 2", {"full_attention_interval": 2}),
        "kernel": ("linear_conv_kernel_dim 3", {"linear_conv_kernel_dim": 3}),
    },
    "qwen3_5_text": {"interval": ("full_attention_interval 2", {"full_attention_interval": 2})},
    "qwen4_exp": {
        "n-grams": (
            "two layers with n-gram embeddings; their token ids are a state too",
            {
                "text_config": {
                    "ple_layer_ids": [1, 3],
                    "ngram_vocab_size_base": 64,
                    "eos_token_id": 2,
                    "ple_embed_dim": 64,
                }
            },
        ),
    },
    "recurrent_gemma": {
        "mqa": (
            "one KV head, lru_width 48",
            {"num_key_value_heads": 1, "lru_width": 48, "conv1d_width": 3},
        ),
        "blocks": ("other blocks", {"block_types": ["attention", "recurrent"]}),
    },
    "smollm3": FROM_LAYER_2,
    "starcoder2": {**NO_WINDOW, **WINDOW},
    "step3p7": {
        "full": ("layer_types left out", {"text_config": {"layer_types": ...}}),
        "groups": (
            "num_attention_groups, as published",
            {"text_config": {"num_key_value_heads": ..., "num_attention_groups": 1}},
        ),
    },
    "t5": {"deeper decoder": ("more layers than the encoder", {"num_decoder_layers": 3})},
    "umt5": {"encoder's depth": ("num_decoder_layers left out", {"num_decoder_layers": ...})},
    "whisper": DECODER,
    "zamba": {
        "list": (
            "layers_block_type given",
            {"layers_block_type": [LINEAR, "hybrid"] * 3, "num_hidden_layers": 6},
        )
    },
    "zamba2": {
        "older names": (
            "mamba and hybrid, as published",
            {"layers_block_type": ["mamba", "hybrid", "mamba"] * 2},
        ),
        "groups": ("num_key_value_heads 2", {"num_key_value_heads": 2, "num_mem_blocks": 1}),
    },
    "zaya": {"full": ("every layer hybrid", {"layer_types": ..., "sliding_window": None})},
}

# These records keep the fields as they are written above, which transformers converts when it loads
# them; of the others the config is what save_pretrained writes.
AS_GIVEN = {
    "bailing_hybrid/linear width as given",
    "cohere2/pattern",
    "deepseek_v4/ratios",
    "gemma3_text/pattern",
    "gemma4_text/fields",
    "glm_moe_dsa/frequency",
    "glm_moe_dsa/pattern",
    "granitemoehybrid/older names",
    "inkling2_loop/loops",
    "inkling_text/local ids",
    "kimi_linear/linear_attn_config",
    "lfm2/no conv",
    "llama/kv absent",
    "llama/head_dim absent",
    "llama4_text/interval",
    "mimo_v2_flash/size",
    "mistral/window absent",
    "modernbert-decoder/every second",
    "nemotron_h/pattern",
    "olmo_hybrid/widths",
    "qwen3_5_text/interval",
    "qwen3_next/interval",
    "step3p7/full",
    "step3p7/groups",
    "zamba2/older names",
}
