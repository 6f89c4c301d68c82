"""Qwen3-MoE: Qwen3 with a mixture of experts in some layers or all."""

from dataclasses import replace

from kvjax.models import llama, qwen3
from kvjax.models.family import Family
from kvjax.models.fields import read_activation
from kvjax.models.mixtral import FUSED_EXPERTS, ROUTER, experts
from kvjax.nn import DecoderConfig, Gated, MoeConfig, Router
from kvjax.sizing import ModelSpec

EXPERTS = experts("model.layers.{i}.mlp.experts.{e}", "gate_proj", "up_proj", "down_proj")


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    base = qwen3.decoder(config, spec)
    sparse = MoeConfig(
        width=config["moe_intermediate_size"],
        experts=config["num_experts" if "num_experts" in config else "num_local_experts"],
        chosen=config.get("num_experts_per_tok", 8),
        router=Router(normed=config.get("norm_topk_prob", False)),
        gate=Gated(read_activation(config, "hidden_act", "silu")),
    )
    step, without = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    mlp = tuple(
        sparse if (i + 1) % step == 0 and i not in without else dense
        for i, dense in enumerate(base.feed_forward)
    )
    return replace(base, mlp=mlp)


FAMILY = Family(
    "qwen3_moe",
    decoder,
    (*llama.TENSORS, *qwen3.QK_NORMS, ROUTER, *EXPERTS),
    other_forms=FUSED_EXPERTS,
)
