"""Golden files from transformers: tiny random models of every family, with their logits.

    python scripts/make_golden.py                       writes tests/golden
    python scripts/make_golden.py --check DIR [DIR ...] compares directories that kvjax wrote

Needs torch and transformers (made with the versions that tests/golden/README.md names), and
imports nothing of kvjax: the two must agree without sharing code. One directory is written per
model, holding config.json and the safetensors as `save_pretrained` writes them, and

  config_v4.json  the fields from which the model was made, in the spelling of transformers 4
                  (rope_theta, rope_scaling, rotary_pct), everything else left to its default;
  ref.npz         input_ids (B, T) int32 and logits (B, T, V) float32 of an eager float32 forward
                  pass; with RoPE also inv_freq (dim/2,) and rope_magnitude, the factor of its
                  cos and sin.

`--check` loads each DIR, which must hold a ref.npz too, with transformers in float32 and prints
the largest absolute difference from the logits there. It exits with 1 if one exceeds `--tolerance`
or if transformers misses, ignores or reshapes a tensor.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
VOCAB = 96
BATCH = 2
SHAPE_64 = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SHAPE_32 = {**SHAPE_64, "hidden_size": 32, "head_dim": 16, "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@dataclass(frozen=True)
class Case:
    """One model: its config in the spelling of transformers 4, and how it is stored."""

    model_type: str
    config: dict[str, Any]
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "1GB"
    tokens: int = 24
    shows: str = field(kw_only=True)  # for the README


CASES = {
    "llama_mha": Case(
        "llama",
        {**SHAPE_64, "head_dim": 24, "intermediate_size": 64},
        max_shard_size="50KB",
        shows="head_dim is not hidden / heads; 8 shards, one layer's q_proj and k_proj apart",
    ),
    "llama_gqa_tied": Case(
        "llama",
        {**SHAPE_64, "num_key_value_heads": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
        dtype=torch.bfloat16,
        max_shard_size="25KB",
        shows="grouped; tied embeddings, no lm_head; bf16 in 5 shards",
    ),
    "llama_bias": Case(
        "llama",
        {**SHAPE_32, "attention_bias": True, "mlp_bias": True},
        shows="biases on all projections",
    ),
    "llama_linear": Case(
        "llama",
        {
            **SHAPE_32,
            "rope_theta": 500000.0,
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
        dtype=torch.bfloat16,
        shows="linear RoPE scaling, spelled `type`",
    ),
    "llama_llama3": Case(
        "llama",
        {**SHAPE_32, "rope_theta": 50000.0, "rope_scaling": LLAMA3},
        tokens=40,
        dtype=torch.bfloat16,
        shows="llama3 RoPE scaling",
    ),
    "llama_yarn": Case(
        "llama",
        {**SHAPE_32, "rope_theta": 50000.0, "rope_scaling": YARN},
        tokens=40,
        dtype=torch.bfloat16,
        shows="YaRN RoPE scaling",
    ),
    "llama_yarn_tuned": Case(
        "llama",
        {
            **SHAPE_32,
            "rope_scaling": {
                **YARN,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
                "mscale": 0.7,
                "mscale_all_dim": 0.4,
                "truncate": False,
            },
        },
        tokens=40,
        dtype=torch.bfloat16,
        shows="YaRN with every optional field",
    ),
    "mistral_gqa": Case(
        "mistral",
        {**SHAPE_32, "sliding_window": None, "rope_theta": 1e6},
        dtype=torch.float16,
        shows="grouped; full attention; f16",
    ),
    "qwen2_mha": Case(
        "qwen2",
        {**SHAPE_64, "num_key_value_heads": 4},
        dtype=torch.bfloat16,
        shows="biases on q, k, v and none on o",
    ),
    "qwen2_gqa": Case(
        "qwen2",
        {**SHAPE_64, "num_key_value_heads": 2, "tie_word_embeddings": True},
        dtype=torch.bfloat16,
        shows="grouped; tied; bf16",
    ),
    "qwen3_mha": Case(
        "qwen3",
        {**SHAPE_64, "head_dim": 32, "num_key_value_heads": 4},
        dtype=torch.bfloat16,
        shows="q and k normed per head; head_dim 32 is not hidden / heads",
    ),
    "qwen3_gqa": Case(
        "qwen3",
        {
            **SHAPE_32,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
        },
        dtype=torch.bfloat16,
        shows="grouped, with biases",
    ),
    "gemma_mqa": Case(
        "gemma",
        {**SHAPE_64, "head_dim": 24, "num_key_value_heads": 1, "hidden_act": "gelu"},
        dtype=torch.bfloat16,
        shows="one KV head; `gelu` means its tanh form here; tied by default",
    ),
    "phi3_fused": Case(
        "phi3",
        {**SHAPE_64, "num_key_value_heads": 2, "pad_token_id": 0},
        dtype=torch.bfloat16,
        shows="fused [q; k; v] and [gate; up]",
    ),
    "phi3_partial_rotary": Case(
        "phi3",
        {
            **SHAPE_64,
            "num_hidden_layers": 1,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "pad_token_id": 0,
        },
        dtype=torch.bfloat16,
        shows="12 of 16 channels rotated",
    ),
    "olmo2_mha": Case(
        "olmo2", SHAPE_64, dtype=torch.bfloat16, shows="norms after; q and k normed at full width"
    ),
    "olmo2_gqa": Case(
        "olmo2",
        {
            **SHAPE_64,
            "hidden_size": 32,
            "num_key_value_heads": 2,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-2,
        },
        dtype=torch.float16,
        shows="grouped",
    ),
    "gpt2_conv1d": Case(
        "gpt2",
        {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "vocab_size": VOCAB,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 64,
            "n_positions": 48,
        },
        shows="weights stored (in, out), two of them square; learned positions",
    ),
    "gpt2_by_layer": Case(
        "gpt2",
        {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 32,
            "activation_function": "relu",
            "scale_attn_by_inverse_layer_idx": True,
            "layer_norm_epsilon": 1e-2,
        },
        dtype=torch.float16,
        shows="n_inner left out; scores scaled by layer",
    ),
    "gpt_neox_interleaved": Case(
        "gpt_neox",
        {**SHAPE_64, "rotary_pct": 0.5, "rotary_emb_base": 5000},
        shows="[q; k; v] of each head interleaved; parallel residual; half of the channels rotated",
    ),
    "gpt_neox_sequential": Case(
        "gpt_neox",
        {
            **SHAPE_64,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "use_parallel_residual": False,
            "attention_bias": False,
            "layer_norm_eps": 1e-2,
        },
        dtype=torch.float16,
        shows="sequential residual; a quarter of the channels rotated; no attention biases",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", nargs="+", type=Path, metavar="DIR", help="compare these")
    parser.add_argument("--tolerance", type=float, default=2e-4, help="for --check (default 2e-4)")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    if arguments.check:
        failed = [path for path in arguments.check if not check(path, arguments.tolerance)]
        sys.exit(bool(failed))
    for name, case in CASES.items():
        make(name, case)
    (GOLDEN / "README.md").write_text(readme())


def make(name: str, case: Case) -> None:
    directory = GOLDEN / name
    shutil.rmtree(directory, ignore_errors=True)
    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model, name)
    model.to(case.dtype).save_pretrained(directory, max_shard_size=case.max_shard_size)
    (directory / "generation_config.json").unlink()
    v4 = {"model_type": case.model_type, **case.config}
    (directory / "config_v4.json").write_text(json.dumps(v4, indent=2) + "\n")
    # The reference is float32 throughout, of the weights as they were rounded for storage; read
    # back, because a cast to bf16 has rounded RoPE's frequencies too.
    model = load(directory)
    input_ids = random(name, "input_ids").integers(0, VOCAB, (BATCH, case.tokens), np.int32)
    reference: dict[str, Any] = {"input_ids": input_ids, "logits": forward(model, input_ids)}
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is not None:
        reference |= {
            "inv_freq": rotary.inv_freq.numpy(),
            "rope_magnitude": rotary.attention_scaling,
        }
    np.savez(directory / "ref.npz", **reference)
    print(f"{name}: logits within {np.abs(reference['logits']).max():.1f}")


def randomise(model: torch.nn.Module, name: str) -> None:
    """Weights of order 1 / sqrt(inputs), and norms and biases off 1 and 0, so that none is idle."""
    for path, parameter in model.named_parameters():
        values = random(name, path).standard_normal(parameter.shape, np.float32)
        if parameter.ndim == 2:
            # Embeddings (V, D) too: logits of tied ones are then of order 1 as well.
            values *= 1.5 * parameter.shape[1] ** -0.5
        else:
            values *= 0.3
            # Gemma stores a norm's distance from one.
            if path.endswith("weight") and model.config.model_type != "gemma":
                values += 1
        parameter.copy_(torch.from_numpy(values))


def random(*seed: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32("/".join(seed).encode()))


def load(directory: Path) -> torch.nn.Module:
    """The model in float32; ValueError if transformers misses, ignores or reshapes a tensor."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if problems := {kind: names for kind, names in info.items() if names}:
        raise ValueError(f"{directory}: {problems}")
    return model.eval()


def forward(model: torch.nn.Module, input_ids: np.ndarray) -> np.ndarray:
    tokens = torch.from_numpy(input_ids.astype(np.int64))
    return model(input_ids=tokens, use_cache=False).logits.numpy()


def check(directory: Path, tolerance: float) -> bool:
    """Whether transformers agrees with the logits of the directory's ref.npz."""
    reference = np.load(directory / "ref.npz")
    logits = forward(load(directory), reference["input_ids"])
    difference = np.abs(logits - reference["logits"]).max()
    ok = bool(difference <= tolerance)
    print(f"{'ok  ' if ok else 'FAIL'} {difference:.2e} {directory}")
    return ok


def readme() -> str:
    rows = "\n".join(f"| {name} | {case.shows} |" for name, case in CASES.items())
    return f"""# Golden files

Tiny random models and their logits, written by `scripts/make_golden.py` (its docstring says what
each file is) with Python {platform.python_version()}, torch {torch.__version__}, \
transformers {transformers.__version__} and numpy {np.__version__}. To write them again, in an
environment with these versions:

    python scripts/make_golden.py

| directory | what it shows |
|---|---|
{rows}

The other direction, that transformers reads what kvjax writes, takes two steps: write each model
anew with kvjax, then let transformers compare.

    python - <<'END'
    import shutil
    from pathlib import Path
    from kvjax import models

    for golden in Path("tests/golden").glob("*/"):
        models.save(models.load(golden), Path("build/golden", golden.name))
        shutil.copy(golden / "ref.npz", Path("build/golden", golden.name))
    END
    python scripts/make_golden.py --check build/golden/*
"""


if __name__ == "__main__":
    main()
