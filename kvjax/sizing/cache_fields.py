"""Names of the config fields by which families of any kind shape their caches.

A config that sets one which its own family does not read is refused: what such a field would do
is not known, and a name that looks like a known one may mean something else.
"""

CACHE_FIELDS = frozenset(
    {
        # sizes
        "hidden_size",
        "n_embd",
        "d_model",
        "num_hidden_layers",
        "num_layers",
        "n_layer",
        "n_layers",
        # query heads
        "num_attention_heads",
        "num_heads",
        "n_head",
        "n_heads",
        "swa_num_attention_heads",
        # KV heads
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "kv_n_heads",
        "num_query_groups",
        "multi_query",
        "multi_query_group_num",
        "multi_query_attention",
        "new_decoder_architecture",
        "attn_config",
        "num_global_key_value_heads",
        "swa_num_key_value_heads",
        # widths of a head
        "head_dim",
        "kv_channels",
        "attention_head_dim",
        "global_head_dim",
        "swa_head_dim",
        "v_head_dim",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        # latents and indexers
        "kv_lora_rank",
        "q_lora_rank",
        "index_head_dim",
        "index_n_heads",
        # windows, chunks and patterns of layers
        "sliding_window",
        "sliding_window_size",
        "window_size",
        "use_sliding_window",
        "max_window_layers",
        "sliding_window_pattern",
        "attention_chunk_size",
        "layer_types",
        "layers_block_type",
        "hybrid_override_pattern",
        "attention_layers",
        "per_layer_config",
        # sharing, other caches, other models
        "num_kv_shared_layers",
        "cross_attention_layers",
        "add_cross_attention",
        "is_encoder_decoder",
        "use_bidirectional_attention",
        "num_nextn_predict_layers",
        "text_config",
    }
)
