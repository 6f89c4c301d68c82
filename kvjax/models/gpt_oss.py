"""gpt-oss: learned attention sinks, windows in every other layer, YaRN, a mixture of experts.

Read from float checkpoints; the published ones keep their experts in MXFP4.
"""

from dataclasses import replace
from typing import Any

from kvjax.models import llama
from kvjax.models.family import Family, Tensor
from kvjax.models.tensor_layout import INTERLEAVED
from kvjax.nn import ClampedSwiglu, DecoderConfig, MoeConfig
from kvjax.sizing import ModelSpec

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_STORED, _EXPERTS = "model.layers.{i}.mlp.experts", "layers.{i}.mlp.experts"
TENSORS = (
    llama.EMBEDDING,
    *llama.SEPARATE_QKV,
    *llama.OUTPUT,
    Tensor("model.layers.{i}.self_attn.sinks", "layers.{i}.attention.sink_logits"),
    *llama.linear("model.layers.{i}.mlp.router", "layers.{i}.mlp.router"),
    Tensor(f"{_STORED}.gate_up_proj", f"{_EXPERTS}.gate_up.kernel", INTERLEAVED),
    Tensor(f"{_STORED}.gate_up_proj_bias", f"{_EXPERTS}.gate_up.bias", INTERLEAVED),
    Tensor(f"{_STORED}.down_proj", f"{_EXPERTS}.down.kernel"),
    Tensor(f"{_STORED}.down_proj_bias", f"{_EXPERTS}.down.bias"),
    *llama.PRE_NORMS,
    llama.FINAL_NORM,
    llama.HEAD,
)


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    config = {"rope_theta": 150000.0, "attention_bias": True, "rms_norm_eps": 1e-5, **config}
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        config["rope_parameters"] = _YARN
    base = llama.with_attention(llama.decoder(config, spec), sinks=True)
    return replace(
        base,
        mlp=MoeConfig(
            width=config["intermediate_size"],
            experts=config["num_local_experts"],
            chosen=config.get("num_experts_per_tok", 4),
            gate=ClampedSwiglu(config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)),
            bias=True,
        ),
    )


FAMILY = Family("gpt_oss", decoder, TENSORS)
