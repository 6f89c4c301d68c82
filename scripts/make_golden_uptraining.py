"""Golden files of uptraining: the same few steps taken by torch and transformers.

    python scripts/make_golden_uptraining.py        writes tests/train/golden/*.npz

Needs torch and transformers, and imports nothing of kvjax. Trains two of the models in tests/golden
with torch's AdamW, clipping and a learning rate computed here in plain Python, one of them with
distillation from the other. Each file holds tokens (steps, B, T + 1) int32 and, per step, the loss,
the gradient's norm before clipping, and the learning rate, float64.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional
from transformers import AutoModelForCausalLM, PreTrainedModel

TESTS = Path(__file__).parents[1] / "tests"
STEPS, BATCH, SEQ_LEN, VOCAB = 8, 4, 16, 96
PEAK, WARMUP, FINAL_SHARE = 1e-2, 3, 0.1
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.3, 0.5
DISTILL_WEIGHT, TEMPERATURE = 0.7, 2.0


def learning_rate(step: int) -> float:
    """Of step 1 to STEPS: linear to the peak, then a cosine to a tenth of it."""
    if step <= WARMUP:
        return PEAK * step / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    return PEAK * (FINAL_SHARE + (1 - FINAL_SHARE) * (1 + math.cos(math.pi * done)) / 2)


def load(name: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        TESTS / "golden" / name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()  # no dropout


def loss_of(
    model: PreTrainedModel, teacher: PreTrainedModel | None, tokens: torch.Tensor
) -> torch.Tensor:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = model(inputs).logits.flatten(0, 1)
    cross_entropy = functional.cross_entropy(logits, targets.flatten())
    if teacher is None:
        return cross_entropy
    with torch.no_grad():
        target = functional.log_softmax(teacher(inputs).logits.flatten(0, 1) / TEMPERATURE, -1)
    divergence = functional.kl_div(
        functional.log_softmax(logits / TEMPERATURE, -1),
        target,
        reduction="batchmean",
        log_target=True,
    )
    return (1 - DISTILL_WEIGHT) * cross_entropy + DISTILL_WEIGHT * TEMPERATURE**2 * divergence


def train(model: PreTrainedModel, teacher: PreTrainedModel | None) -> dict[str, np.ndarray]:
    # Matrices shrink, except embeddings (and a head that is tied to them).
    embeddings = {model.get_input_embeddings().weight}
    if hasattr(model, "transformer"):
        embeddings.add(model.transformer.wpe.weight)
    decayed = [p for p in model.parameters() if p.ndim == 2 and p not in embeddings]
    others = [p for p in model.parameters() if p.ndim == 1 or p in embeddings]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": WEIGHT_DECAY},
            {"params": others, "weight_decay": 0.0},
        ],
        betas=BETAS,
        eps=1e-8,
    )
    tokens = np.random.default_rng(0).integers(0, VOCAB, (STEPS, BATCH, SEQ_LEN + 1), np.int32)
    losses, norms, rates = [], [], []
    for step, batch in enumerate(torch.from_numpy(tokens).long(), start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.zero_grad()
        loss = loss_of(model, teacher, batch)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
        rates.append(learning_rate(step))
    return {
        "tokens": tokens,
        "loss": np.array(losses),
        "grad_norm": np.array(norms),
        "lr": np.array(rates),
    }


def main() -> None:
    directory = TESTS / "train" / "golden"
    directory.mkdir(exist_ok=True)
    runs = {
        "llama_bias": train(load("llama_bias"), None),
        "gpt2_conv1d": train(load("gpt2_conv1d"), None),
        "llama_bias_distilled": train(load("llama_bias"), load("gpt2_conv1d")),
    }
    for name, arrays in runs.items():
        np.savez(directory / f"{name}.npz", allow_pickle=False, **arrays)
        print(name, arrays["loss"].round(4), arrays["grad_norm"].round(3))


if __name__ == "__main__":
    main()
