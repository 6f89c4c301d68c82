"""The sweep of variants: its parts, and, where slow, all of its code."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.bench import timing
from kvjax.bench.case import Inputs
from kvjax.ops import decode_attention

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def sweep(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0.0)
    return importlib.import_module("variants_sweep")


@pytest.fixture
def tiny(sweep):
    """Smaller still than a quick run."""
    return replace(
        sweep.QUICK,
        array_bytes=2**16,
        shapes=((2, 32), (1, 64)),
        dims=(64,),
        batches=(1, 2),
        lengths=(32,),
    )


def test_layouts_hold_the_same_numbers(sweep):
    """Either layout at once gives what the library gives block by block."""
    inputs = Inputs(sweep.case(2, 40, 2))
    want = decode_attention(inputs.q, inputs.k, inputs.v, inputs.lengths)
    for got in (
        sweep.head_major(inputs.q, inputs.k, inputs.v),
        sweep.token_major(inputs.q, *inputs.token_major),
    ):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_contenders_that_differ_are_an_error(sweep, tiny, monkeypatch):
    one = sweep.case(1, 16, 8)
    for wrong in (lambda q, k, v: q, lambda q, k, v: q * jnp.nan):
        monkeypatch.setattr(sweep, "token_major", wrong)
        with pytest.raises(RuntimeError, match="token-major and kvjax differ"):
            sweep.timed([one], ("kvjax", "token-major"), tiny)


def test_every_way_reads_what_it_says(sweep, tiny):
    """Bytes and FLOP of each way, of which a window's are the window's."""
    found = sweep.fewer_bytes(tiny)
    per_byte = {row["by"]: row["intensity_flop_per_byte"] for row in found["rows"]}
    base = found["rows"][0]["bytes_per_step"]
    fewer = {row["by"]: base / row["bytes_per_step"] for row in found["rows"]}
    assert {by: fewer[by] for by in ("4 KV heads", "window of 16", "bf16")} == {
        "4 KV heads": 2,
        "window of 16": 2,
        "bf16": 2,
    }
    assert (fewer["1 KV head"], fewer["window of 4"], fewer["fp8_e4m3"]) == (8, 8, 4)
    assert per_byte["MHA, f32"] == per_byte["window of 4"] == 0.5
    assert (per_byte["1 KV head"], per_byte["fp8_e4m3"]) == (4, 2)
    assert set(found["layers"]) == {"two layers, two caches", "two layers, one cache"}


def test_a_page_stands_beside_the_article(sweep, tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(sweep, "QUICK", tiny)
    path = sweep.main(["--quick", "--out", str(tmp_path)])
    assert {found.name for found in tmp_path.iterdir()} == {
        f"variants_sweep.{end}" for end in ("json", "md", "png")
    }
    page = path.with_suffix(".md").read_text()
    assert "**GPU figures are pending**" in page
    assert "(the article's kernel: 2.38; its floor: 8)" in page
    assert "(the article's kernel: 2.12; its floor: 8)" in page
    assert "from 1 to its largest batch: 51; the floor: 1" in page
    assert "python experiments/variants_sweep.py --quick" in page
    figures = json.loads(path.read_text())
    names = [table["name"] for table in figures["tables"]]
    assert names == [
        *("KV heads, 2 x 32 tokens", "KV heads, 1 x 64 tokens", "Head dims, 1 KV head"),
        *("Batch, 8 KV heads", "Batch, 1 KV head", "Tokens of one row, 2 KV heads"),
    ]
    assert all(f"## {name}\n" in page for name in names)
    first = figures["tables"][0]
    assert [(row["kv_heads"], row["contender"]) for row in first["rows"][:4]] == [
        *((8, "kvjax"), (8, "head-major"), (8, "token-major"), (4, "kvjax"))
    ]
    assert all(table["bandwidth"]["yardstick"] for table in figures["tables"])
    assert str(tmp_path) not in path.read_text()


@pytest.mark.slow
def test_all_of_the_code_runs(sweep, tmp_path):
    path = sweep.main(["--quick", "--out", str(tmp_path)])
    assert path.with_suffix(".png").stat().st_size < 150_000
    assert json.loads(path.read_text())["seconds"] > 0
