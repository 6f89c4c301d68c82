"""GPT-NeoX and Pythia: LayerNorm, partial RoPE, parallel residual, q, k, v fused head by head."""

from dataclasses import replace

from kvjax.models.family import Family, Tensor
from kvjax.models.fields import read_activation, read_rope
from kvjax.models.gpt2 import layer_norm
from kvjax.models.llama import HEAD, linear
from kvjax.models.tensor_layout import GROUPED_BY_KV_HEAD, TRANSPOSED
from kvjax.nn import AttentionConfig, DecoderConfig, MlpConfig, NormConfig
from kvjax.sizing import ModelSpec

_LAYER = "gpt_neox.layers.{i}"


TENSORS = (
    Tensor("gpt_neox.embed_in.weight", "embed.embedding"),
    *layer_norm(f"{_LAYER}.input_layernorm", "layers.{i}.attention_norm"),
    Tensor(
        f"{_LAYER}.attention.query_key_value.weight",
        "layers.{i}.attention.qkv.kernel",
        GROUPED_BY_KV_HEAD,
    ),
    Tensor(
        f"{_LAYER}.attention.query_key_value.bias",
        "layers.{i}.attention.qkv.bias",
        GROUPED_BY_KV_HEAD,
    ),
    *linear(f"{_LAYER}.attention.dense", "layers.{i}.attention.o"),
    *layer_norm(f"{_LAYER}.post_attention_layernorm", "layers.{i}.mlp_norm"),
    *linear(f"{_LAYER}.mlp.dense_h_to_4h", "layers.{i}.mlp.up"),
    *linear(f"{_LAYER}.mlp.dense_4h_to_h", "layers.{i}.mlp.down"),
    *layer_norm("gpt_neox.final_layer_norm", "norm"),
    Tensor("embed_out.weight", "head.kernel", TRANSPOSED),
)


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    bias = config.get("attention_bias", True)
    fraction = config.get("rotary_pct", 0.25)
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        d_model=spec.d_model,
        attention=tuple(
            AttentionConfig(
                d_model=spec.d_model,
                query_heads=layer.query_heads,
                kv_heads=layer.kv_heads,
                key_dim=layer.key_dim,
                value_dim=layer.value_dim,
                qkv_bias=bias,
                out_bias=bias,
                fused=True,
                rope=read_rope(
                    config,
                    layer.key_dim,
                    theta_field="rotary_emb_base",
                    rotary_fraction=fraction,
                ),
            )
            for layer in spec.layers
        ),
        mlp=MlpConfig(
            width=config["intermediate_size"],
            activation=read_activation(config, "hidden_act", "gelu"),
            gated=False,
            bias=True,
        ),
        norm=NormConfig("layer", config.get("layer_norm_eps", 1e-5)),
        parallel_residual=config.get("use_parallel_residual", True),
        tied=config.get("tie_word_embeddings", False),
    )


FAMILY = Family(
    "gpt_neox",
    decoder,
    TENSORS,
    prefix="gpt_neox.",
    kv_heads_field=None,
    ignored=(r"\.attention\.(masked_)?bias$", r"\.rotary_emb\.inv_freq$"),
    other_forms=(HEAD,),
)
# GPT-NeoX with fewer KV heads than query heads, which no other library has a name for.
GROUPED = replace(FAMILY, model_type="kvjax_gpt_neox", kv_heads_field="num_key_value_heads")
