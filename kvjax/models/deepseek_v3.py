"""DeepSeek-V3 (R1, Kimi-K2): DeepSeek-V2 with another router, whose choice a bias corrects."""

from dataclasses import replace

from kvjax.models import deepseek_v2
from kvjax.models.family import Family, Tensor
from kvjax.models.fields import choose
from kvjax.models.mixtral import FUSED_EXPERTS
from kvjax.nn import DecoderConfig, Groups, Router
from kvjax.sizing import ModelSpec

CORRECTION = Tensor(
    "model.layers.{i}.mlp.gate.e_score_correction_bias", "layers.{i}.mlp.correction"
)
# A layer that predicts further tokens, after those of the decoder.
NEXT_TOKENS = r"^model\.layers\.{depth}\."


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    choose("scoring_func", config.get("scoring_func", "sigmoid"), {"sigmoid": None})
    choose("topk_method", config.get("topk_method", "noaux_tc"), {"noaux_tc": None})
    choose("rope_interleave", config.get("rope_interleave", True), {True: None})
    config = {
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        **config,
    }
    router = Router(
        "sigmoid",
        normed=config.get("norm_topk_prob", True),
        scale=config.get("routed_scaling_factor", 2.5),
        groups=Groups(config.get("n_group", 8), config.get("topk_group", 4), judged_by=2),
        corrected=True,
    )
    base = deepseek_v2.latent_decoder({**config, "mlp_bias": False}, spec)
    return deepseek_v2.with_experts(base, config, router)


FAMILY = Family(
    "deepseek_v3",
    decoder,
    (*deepseek_v2.TENSORS, CORRECTION),
    ignored=(r"rotary_emb\.inv_freq$", NEXT_TOKENS),
    other_forms=FUSED_EXPERTS,
)
# Published with a class of its own that only renames DeepSeek-V3's.
KIMI_K2 = replace(FAMILY, model_type="kimi_k2")
