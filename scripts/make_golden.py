"""Golden files from transformers: tiny random models of every family, with their logits.

    python scripts/make_golden.py [NAME ...]            writes tests/golden, or these models of it
    python scripts/make_golden.py --check DIR [DIR ...] compares directories that kvjax wrote

Needs torch and transformers (made with the versions that tests/golden/README.md names), and
imports nothing of kvjax: the two must agree without sharing code. One directory is written per
model, holding config.json and the safetensors as `save_pretrained` writes them, and

  config_v4.json  the fields from which the model was made, in the spelling of transformers 4
                  (rope_theta, rope_scaling, rotary_pct), everything else left to its default;
  ref.npz         input_ids (B, T) int32 and logits (B, T, V) float32 of an eager float32 forward
                  pass; with RoPE also inv_freq (dim/2,) and rope_magnitude, the factor of its
                  cos and sin, or both for each kind of layer, such as sliding_attention_inv_freq.

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
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from golden_cases import CASES as PLAIN_CASES
from golden_cases import VOCAB, Case
from golden_latent_cases import CASES as LATENT_CASES
from golden_moe_cases import CASES as MOE_CASES
from golden_window_cases import CASES as WINDOW_CASES

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
CASES = {**PLAIN_CASES, **WINDOW_CASES, **MOE_CASES, **LATENT_CASES}
BATCH = 2
# Families that store the distance of a norm's scale from one.
UNIT_OFFSET = ("gemma", "gemma2", "gemma3_text")
# A buffer that checkpoints hold, in float32 whatever the rest is in.
CORRECTION = "e_score_correction_bias"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all models")
    parser.add_argument("--check", nargs="+", type=Path, metavar="DIR", help="compare these")
    parser.add_argument("--tolerance", type=float, default=2e-4, help="for --check (default 2e-4)")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    if arguments.check:
        failed = [path for path in arguments.check if not check(path, arguments.tolerance)]
        sys.exit(bool(failed))
    for name in arguments.names or CASES:
        make(name, CASES[name])
    (GOLDEN / "README.md").write_text(readme())


def make(name: str, case: Case) -> None:
    directory = GOLDEN / name
    shutil.rmtree(directory, ignore_errors=True)
    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model, name)
    exact = {path: buffer.clone() for path, buffer in corrections(model)}
    model.to(case.dtype)
    for path, buffer in corrections(model):
        buffer.data = exact[path]
    model.save_pretrained(directory, max_shard_size=case.max_shard_size)
    (directory / "generation_config.json").unlink()
    v4 = {"model_type": case.model_type, **case.config}
    (directory / "config_v4.json").write_text(json.dumps(v4, indent=2) + "\n")
    # The reference is float32 throughout, of the weights as they were rounded for storage; read
    # back, because a cast to bf16 has rounded RoPE's frequencies too.
    model = load(directory)
    input_ids = random(name, "input_ids").integers(0, VOCAB, (BATCH, case.tokens), np.int32)
    reference: dict[str, Any] = {"input_ids": input_ids, "logits": forward(model, input_ids)}
    reference |= rotary(model)
    np.savez(directory / "ref.npz", **reference)
    print(f"{name}: logits within {np.abs(reference['logits']).max():.1f}")


def rotary(model: torch.nn.Module) -> dict[str, Any]:
    """Frequencies and magnitude of RoPE, by the kind of layer where these have their own."""
    module = getattr(model.base_model, "rotary_emb", None)
    return {
        f"{kind}{name}": getattr(module, f"{kind}{attribute}")
        for kind in ("", "full_attention_", "sliding_attention_")
        for name, attribute in (("inv_freq", "inv_freq"), ("rope_magnitude", "attention_scaling"))
        if hasattr(module, f"{kind}{attribute}")
    }


def randomise(model: torch.nn.Module, name: str) -> None:
    """Weights of order 1 / sqrt(inputs), and norms and biases off 1 and 0, so that none is idle."""
    for path, parameter in (*model.named_parameters(), *corrections(model)):
        values = random(name, path).standard_normal(parameter.shape, np.float32)
        if parameter.ndim > 1:
            # Embeddings (V, D) too: logits of tied ones are then of order 1 as well.
            values *= 1.5 * parameter.shape[1] ** -0.5
        else:
            values *= 0.3
            if path.endswith("weight") and model.config.model_type not in UNIT_OFFSET:
                values += 1
        parameter.copy_(torch.from_numpy(values))


def corrections(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(path, buffer) for path, buffer in model.named_buffers() if path.endswith(CORRECTION)]


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
