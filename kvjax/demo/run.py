"""The main job end to end: size, convert, score, uptrain, generate, measure."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvjax import sizing
from kvjax.bench import decode_step
from kvjax.convert import METHODS, to_gqa, to_mha
from kvjax.demo.presets import HELD_OUT_TEXT, PRESETS, TRAIN_TEXT, Preset
from kvjax.engine import generate_text
from kvjax.models import load
from kvjax.models.checkpoint import Checkpoint
from kvjax.train import held_out_loss, uptrain
from kvjax.train.data import read_tokens


@dataclass(frozen=True)
class DemoReport:
    """What one run of the demo found; plain data.

    Attributes:
      title: the model.
      bytes_per_token: KV heads -> cache bytes per token, bf16.
      losses: "source", "2 mean", ... -> nats per token on the held-out text.
      uptraining: loss of each step.
      uptrained: name and held-out loss of the uptrained model.
      twin_restored: whether the MHA twin converted back to the source bit for bit; None where the
        source is MHA itself.
      texts: name -> prompt and generated text.
      decode: whole decode steps as measured (`kvjax.bench.decode_step.measure`).
    """

    title: str
    bytes_per_token: dict[int, int]
    losses: dict[str, float]
    uptraining: list[float]
    uptrained: tuple[str, float]
    twin_restored: bool | None
    texts: dict[str, str]
    decode: dict[str, Any]


def run_demo(name: str, out_dir: Path, say: Callable[[str], None]) -> DemoReport:
    """Run the demo of that name; models go to out_dir, what is being done is told to `say`.

    Raises:
      ValueError: no such model.
      FileNotFoundError: the model is not installed.
    """
    if name not in PRESETS:
        raise ValueError(f"model={name!r}: accepted are {', '.join(PRESETS)}")
    preset = PRESETS[name]
    work = out_dir / "models"
    # What an earlier run converted would be in the way; a source, once unpacked, is kept.
    for left in work.glob("converted-*"):
        shutil.rmtree(left)
    work.mkdir(parents=True, exist_ok=True)
    source = preset.prepare(work)
    say(f"Source: {source}")
    twin_restored = _check_twin(source, work, say)

    converted = _convert(preset, source, work, say)
    vocab_size = sizing.read_config(source)["vocab_size"]
    held_out = read_tokens(HELD_OUT_TEXT, source, vocab_size, at_least=preset.held_out_tokens)
    held_out = held_out[: preset.held_out_tokens]
    losses = {}
    for label, directory in {"source": source, **converted}.items():
        losses[label] = held_out_loss(load(directory, "f32"), held_out, preset.seq_len, batch=4)
        say(f"  {label}: {losses[label]:.3f} nats per token on held-out text")

    best = f"{preset.kv_heads[-1]} mean"
    steps: list[float] = []
    say(f"Uptraining {best} for {preset.uptraining.steps} steps")
    result = uptrain(
        converted[best],
        work / "converted-uptrained",
        TRAIN_TEXT,
        preset.uptraining,
        work_dir=work / "converted-uptrained.train",
        save_every=preset.uptraining.total_steps,
        on_step=lambda metrics: steps.append(metrics["loss"]),
    )
    uptrained = Path(result.directory)
    after = held_out_loss(load(uptrained, "f32"), held_out, preset.seq_len, batch=4)
    say(f"  {best}: {losses[best]:.3f} before, {after:.3f} after")

    compared = {"source": source, best: converted[best], f"{best}, uptrained": uptrained}
    texts = {label: _write_text(preset, directory) for label, directory in compared.items()}
    by_kv_heads = _by_kv_heads(source, converted)
    say(f"Timing decode steps of {preset.decode_batch} rows of {preset.decode_length:,} tokens")
    decode = decode_step.measure(
        {f"{heads} KV heads": load(path, "f32") for heads, path in by_kv_heads.items()},
        batch=[preset.decode_batch],
        length=[preset.decode_length],
        codec=["f32"],
    )
    return DemoReport(
        title=preset.title,
        bytes_per_token={
            heads: sizing.load(directory).bytes_per_token()
            for heads, directory in by_kv_heads.items()
        },
        losses=losses,
        uptraining=steps,
        uptrained=(f"{best}, uptrained", after),
        twin_restored=twin_restored,
        texts=texts,
        decode=decode,
    )


def _convert(
    preset: Preset, source: Path, work: Path, say: Callable[[str], None]
) -> dict[str, Path]:
    """Name such as "2 mean", "2 first", ... -> the converted model."""
    converted = {}
    for kv_heads in preset.kv_heads:
        for method in METHODS:
            directory = work / f"converted-{kv_heads}-{method}"
            report = to_gqa(source, directory, kv_heads, method, evaluate_on=False)
            converted[f"{kv_heads} {method}"] = directory
        say(
            f"Converted to {kv_heads} KV heads ({', '.join(METHODS)}): "
            f"{report.bytes_per_token_before:,} -> {report.bytes_per_token_after:,} bytes per token"
        )
    return converted


def _check_twin(source: Path, work: Path, say: Callable[[str], None]) -> bool | None:
    """Write a GQA source's KV heads out as MHA and pool them back: every bit must return."""
    layer = sizing.load(source).layers[0]
    if layer.kv_heads == layer.query_heads:
        return None
    twin, back = work / "converted-twin", work / "converted-twin-back"
    to_mha(source, twin)
    to_gqa(twin, back, layer.kv_heads, evaluate_on=False)
    original, restored = Checkpoint(source), Checkpoint(back)
    same = all(
        np.array_equal(original.view(name).view(np.uint8), restored.view(name).view(np.uint8))
        for name in original.names()
    )
    verdict = "the same bits" if same else "DIFFERENT BITS"
    say(f"MHA twin converted back to {layer.kv_heads} KV heads: {verdict}")
    shutil.rmtree(twin)
    shutil.rmtree(back)
    return same


def _write_text(preset: Preset, directory: Path) -> str:
    (text,) = generate_text(
        directory, [preset.prompt], preset.new_tokens, dtype="f32", codec="f32"
    ).texts
    return preset.prompt + text


def _by_kv_heads(source: Path, converted: dict[str, Path]) -> dict[int, Path]:
    """KV heads -> a model that has so many, most first."""
    directories = (source, *(path for label, path in converted.items() if label.endswith("mean")))
    return {sizing.load(directory).layers[0].kv_heads: directory for directory in directories}
