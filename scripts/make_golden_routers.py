"""Golden file of DeepSeek's mixtures of experts: transformers' own modules on random tokens.

    python scripts/make_golden_routers.py        writes tests/golden/routers.npz

Needs torch and transformers (the file names the versions that it was made with), and imports
nothing of kvjax: the two must agree without sharing code. In float32. All cases have the same
tokens and weights, for E experts in GROUPS groups:

  hidden (M, D)                             tokens
  router (E, D), correction (E,)            of the choice; the correction is DeepSeek-V3's alone
  gate_up (E, 2F, D), down (E, D, F)        of the experts, [gate; up]
  shared_gate, shared_up (SF, D), shared_down (D, SF)
                                            of what every token passes
  NAME_picked, NAME_weights (M, k)          experts of each token, in no order, and their weights
  NAME_out (M, D)                           what the module gives
  versions                                  of torch and transformers
"""

from __future__ import annotations

import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

OUT = Path(__file__).parents[1] / "tests" / "golden" / "routers.npz"
TOKENS, D_MODEL, EXPERTS, WIDTH, SHARED, CHOSEN, GROUPS = 24, 8, 12, 5, 2, 4, 4
GROUPED = {"n_group": GROUPS, "topk_group": 2}
CASES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "v2_greedy": (DeepseekV2Moe, DeepseekV2Config, {"routed_scaling_factor": 1.5}),
    "v2_groups": (
        DeepseekV2Moe,
        DeepseekV2Config,
        {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, **GROUPED},
    ),
    "v3": (DeepseekV3MoE, DeepseekV3Config, GROUPED),
    "v3_not_normed": (DeepseekV3MoE, DeepseekV3Config, {"norm_topk_prob": False, **GROUPED}),
}


def main() -> None:
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    shared = SHARED * WIDTH
    shapes = {
        "hidden": (TOKENS, D_MODEL),
        "router": (EXPERTS, D_MODEL),
        "gate_up": (EXPERTS, 2 * WIDTH, D_MODEL),
        "down": (EXPERTS, D_MODEL, WIDTH),
        "shared_gate": (shared, D_MODEL),
        "shared_up": (shared, D_MODEL),
        "shared_down": (D_MODEL, shared),
    }
    arrays = {name: torch.randn(shape) / math.sqrt(shape[-1]) for name, shape in shapes.items()}
    arrays["hidden"] = 3 * arrays["hidden"]
    arrays["correction"] = 0.3 * torch.randn(EXPERTS)
    results = {}
    for name, (module_type, config_type, settings) in CASES.items():
        config = config_type(
            hidden_size=D_MODEL,
            moe_intermediate_size=WIDTH,
            n_routed_experts=EXPERTS,
            n_shared_experts=SHARED,
            num_experts_per_tok=CHOSEN,
            num_attention_heads=1,
            num_key_value_heads=1,
            **settings,
        )
        module = fill(module_type(config), arrays)
        _, weights, picked = module.gate(arrays["hidden"])
        results[f"{name}_picked"] = picked.to(torch.int32)
        results[f"{name}_weights"] = weights
        results[f"{name}_out"] = module(arrays["hidden"][None])[0]
    versions = [f"{package} {version(package)}" for package in ("torch", "transformers")]
    found: dict[str, Any] = {name: values.numpy() for name, values in (arrays | results).items()}
    np.savez(OUT, versions=np.array(versions), **found)
    print(f"{OUT.name}: {OUT.stat().st_size} bytes")


def fill(module: Any, arrays: dict[str, torch.Tensor]) -> Any:
    """The module with these weights in place of its own."""
    module.gate.weight.copy_(arrays["router"])
    if hasattr(module.gate, "e_score_correction_bias"):
        module.gate.e_score_correction_bias.copy_(arrays["correction"])
    module.experts.gate_up_proj.copy_(arrays["gate_up"])
    module.experts.down_proj.copy_(arrays["down"])
    for part in ("gate", "up", "down"):
        getattr(module.shared_experts, f"{part}_proj").weight.copy_(arrays[f"shared_{part}"])
    return module


if __name__ == "__main__":
    main()
