"""Mixtral: Mistral with a mixture of experts in each layer."""

from dataclasses import replace

from kvjax.models import llama
from kvjax.models.family import Family, Tensor
from kvjax.models.fields import read_activation
from kvjax.models.tensor_layout import EACH_TRANSPOSED, TRANSPOSED
from kvjax.nn import DecoderConfig, Gated, MoeConfig
from kvjax.sizing import ModelSpec

_EXPERTS = "layers.{i}.mlp.experts"
_BLOCK = "model.layers.{i}.block_sparse_moe"


def experts(name: str, gate: str, up: str, down: str) -> tuple[Tensor, ...]:
    """The projections of experts, each in a tensor of its own; "{e}" stands for the expert."""
    return (
        Tensor(f"{name}.{gate}.weight", f"{_EXPERTS}.gate_up.kernel", TRANSPOSED, half=0),
        Tensor(f"{name}.{up}.weight", f"{_EXPERTS}.gate_up.kernel", TRANSPOSED, half=1),
        Tensor(f"{name}.{down}.weight", f"{_EXPERTS}.down.kernel", TRANSPOSED),
    )


# As transformers 5 has them in memory, and saves them with save_original_format=False.
FUSED_EXPERTS = (
    Tensor(
        "model.layers.{i}.mlp.experts.gate_up_proj", f"{_EXPERTS}.gate_up.kernel", EACH_TRANSPOSED
    ),
    Tensor("model.layers.{i}.mlp.experts.down_proj", f"{_EXPERTS}.down.kernel", EACH_TRANSPOSED),
)
ROUTER = Tensor("model.layers.{i}.mlp.gate.weight", "layers.{i}.mlp.router.kernel", TRANSPOSED)
TENSORS = (
    llama.EMBEDDING,
    *llama.SEPARATE_QKV,
    *llama.OUTPUT,
    replace(ROUTER, name=f"{_BLOCK}.gate.weight"),
    *experts(f"{_BLOCK}.experts.{{e}}", "w1", "w3", "w2"),
    *llama.PRE_NORMS,
    llama.FINAL_NORM,
    llama.HEAD,
)


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    config = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, **config}
    experts = MoeConfig(
        width=config["intermediate_size"],
        experts=config["num_local_experts"],
        chosen=config.get("num_experts_per_tok", 2),
        gate=Gated(read_activation(config, "hidden_act", "silu")),
    )
    return replace(llama.decoder(config, spec), mlp=experts)


FAMILY = Family("mixtral", decoder, TENSORS, other_forms=(ROUTER, *FUSED_EXPERTS))
