"""GPT-2: LayerNorm, learned positions, fused [q | k | v], weights stored (in, out) by Conv1D."""

from dataclasses import replace

from kvjax.models.family import Family, Tensor
from kvjax.models.fields import choose, read_activation
from kvjax.nn import AttentionConfig, DecoderConfig, MlpConfig, NormConfig
from kvjax.sizing import ModelSpec


def _conv1d(name: str, path: str) -> tuple[Tensor, Tensor]:
    return Tensor(f"{name}.weight", f"{path}.kernel"), Tensor(f"{name}.bias", f"{path}.bias")


def layer_norm(name: str, path: str) -> tuple[Tensor, Tensor]:
    """A torch.nn.LayerNorm: its scale, and its bias."""
    return Tensor(f"{name}.weight", f"{path}.scale"), Tensor(f"{name}.bias", f"{path}.bias")


TENSORS = (
    Tensor("transformer.wte.weight", "embed.embedding"),
    Tensor("transformer.wpe.weight", "positions.embedding"),
    *layer_norm("transformer.h.{i}.ln_1", "layers.{i}.attention_norm"),
    *_conv1d("transformer.h.{i}.attn.c_attn", "layers.{i}.attention.qkv"),
    *_conv1d("transformer.h.{i}.attn.c_proj", "layers.{i}.attention.o"),
    *layer_norm("transformer.h.{i}.ln_2", "layers.{i}.mlp_norm"),
    *_conv1d("transformer.h.{i}.mlp.c_fc", "layers.{i}.mlp.up"),
    *_conv1d("transformer.h.{i}.mlp.c_proj", "layers.{i}.mlp.down"),
    *layer_norm("transformer.ln_f", "norm"),
)


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    choose("tie_word_embeddings", config.get("tie_word_embeddings", True), {True: None})
    scaled = config.get("scale_attn_weights", True)
    by_layer = config.get("scale_attn_by_inverse_layer_idx", False)
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
                qkv_bias=True,
                out_bias=True,
                fused=True,
                scale=(layer.key_dim**-0.5 if scaled else 1.0) / (i + 1 if by_layer else 1),
            )
            for i, layer in enumerate(spec.layers)
        ),
        mlp=MlpConfig(
            width=config.get("n_inner") or 4 * spec.d_model,
            activation=read_activation(config, "activation_function", "gelu_new"),
            gated=False,
            bias=True,
        ),
        norm=NormConfig("layer", config.get("layer_norm_epsilon", 1e-5)),
        max_positions=config.get("n_positions", 1024),
        tied=True,
    )


FAMILY = Family(
    "gpt2",
    decoder,
    TENSORS,
    prefix="transformer.",
    kv_heads_field=None,
    ignored=(r"\.attn\.(masked_)?bias$",),
)
# GPT-2 with fewer KV heads than query heads, which no other library has a name for.
GROUPED = replace(FAMILY, model_type="kvjax_gpt2", kv_heads_field="num_key_value_heads")
