"""The demo on a model of a few thousand parameters: every step runs, and the report says what was
found.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from quick import rest_slow

from kvjax import demo, models
from kvjax.demo import presets, run
from kvjax.models.checkpoint import copy_side_files
from kvjax.train import UptrainConfig

SHIPPED = presets.DATA / "demo_model"


def tiny_preset(kv_heads: int) -> presets.Preset:
    """Four query heads of 8 channels over that many KV heads, with the shipped tokenizer."""

    def prepare(work: Path) -> Path:
        config = json.loads((SHIPPED / "config.json").read_text()) | {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": kv_heads,
            "head_dim": 8,
        }
        directory = work / "source"
        models.save(models.init(config, dtype="bf16"), directory)
        copy_side_files(SHIPPED, directory)
        return directory

    return replace(
        presets.PRESETS["kjv"],
        title="a tiny model",
        prepare=prepare,
        kv_heads=(1,),
        held_out_tokens=65,
        seq_len=32,
        uptraining=UptrainConfig(steps=12, seq_len=32, batch=4, learning_rate=1e-2, warmup_steps=1),
        new_tokens=3,
        decode_batch=2,
        decode_length=16,
    )


@pytest.mark.parametrize("kv_heads", rest_slow([4, 2], [2]))
def test_every_step_runs_and_is_reported(tmp_path, monkeypatch, kv_heads):
    monkeypatch.setitem(run.PRESETS, "tiny", tiny_preset(kv_heads))
    lines = []
    report = demo.run_demo("tiny", tmp_path, lines.append)
    # 1 layer, K and V of 8 channels, 2 bytes.
    assert report.bytes_per_token == {kv_heads: kv_heads * 32, 1: 32}
    assert set(report.losses) == {"source", "1 mean", "1 first", "1 random"}
    assert report.uptraining[-1] < report.uptraining[0]
    assert report.twin_restored is (None if kv_heads == 4 else True)
    assert [row["kv_heads"] for row in report.decode["rows"]] == [kv_heads, 1]

    page = demo.write_report(report, tmp_path).read_text()
    assert f"| 1 mean | {report.losses['1 mean']:.3f} |" in page
    for plot in ("losses.png", *(name for name in os.listdir(tmp_path) if "step" in name)):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "report.json").read_text())["losses"] == report.losses


def test_an_unknown_model_is_named(tmp_path):
    with pytest.raises(ValueError, match="model='llama': accepted are kjv, smollm2"):
        demo.run_demo("llama", tmp_path, print)


def test_the_shipped_model_is_mha_and_small():
    from kvjax import sizing

    spec = sizing.load(SHIPPED)
    assert {(layer.query_heads, layer.kv_heads) for layer in spec.layers} == {(8, 8)}
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 6 * 10**6
    texts = [presets.TRAIN_TEXT, presets.HELD_OUT_TEXT]
    assert sum(path.stat().st_size for path in texts) <= 10**6
    assert not set(texts[0].read_text().splitlines()) & set(texts[1].read_text().splitlines()) - {
        ""
    }
