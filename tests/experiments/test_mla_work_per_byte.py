"""The study of MLA's work for each byte: its parts, and, where slow, all of its code."""

import importlib
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.bench import result, timing
from kvjax.bench.bandwidth import Bandwidth
from kvjax.bench.timing import Timing

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0.0)
    return importlib.import_module


@pytest.fixture
def study(load):
    return load("mla_work_per_byte")


@pytest.fixture
def tiny(load, monkeypatch):
    """Forms of two heads, so narrow that they compile and run at once."""
    module = load("mla_forms")
    for name, width in {"HEAD": 4, "LATENT": 16, "ROPE": 4, "D_MODEL": 8}.items():
        monkeypatch.setattr(module, name, width)
    return module


def test_bytes_are_the_papers(load):
    """arXiv:2505.21487, table of 16 heads of 128 in bf16: bytes a token and layer on one device."""
    found = {name: form.bytes_read(1) for name, form in load("mla_forms").forms(16).items()}
    assert found == {
        "MHA": 8192,
        "GQA-8": 4096,
        "MQA": 512,
        "MLA, absorbed": 1152,
        "MLA, expanded at each step": 1152,
        "MLA, expanded in the cache": 16 * (192 + 128) * 2,
        "GLA-2": 1152,
        "GTA-4": 1152,
    }


def test_work_for_each_byte(load):
    """In bf16, at 128 heads: G with keys and values, 2 N L / (L + R) and more with latents."""
    found = {name: form.intensity for name, form in load("mla_forms").forms(128).items()}
    per_token = 2 * 128 * (192 + 128) + 2 * 128 * 512 * (128 + 128)
    assert found == pytest.approx(
        {
            "MHA": 1,
            "GQA-8": 16,
            "MQA": 128,
            "MLA, absorbed": 128 * (2 * 512 + 64) / (512 + 64),
            "MLA, expanded at each step": per_token / 1152,
            "MLA, expanded in the cache": 1,
            "GLA-2": 128 * (2 * 256 + 64) / (2 * 256 + 64),
            "GTA-4": 128 * 2 * 128 / (4 * 128 + 64),
        }
    )


def test_a_step_counts_the_up_projections(load):
    """Once for the batch in bytes; for each sequence, or for each of its tokens, in FLOP."""
    forms = load("mla_forms").forms(128)
    up = 128 * 512 * (128 + 128)
    absorbed = forms["MLA, absorbed"].work(4, 1000)
    assert absorbed.memory_bytes == 4 * 1000 * 1152 + 2 * up
    assert absorbed.matrix_flop == 4 * (1000 * 2 * 128 * 1088 + 2 * up)
    assert absorbed.exponentials == 4 * 1000 * 128
    expanding = forms["MLA, expanded at each step"].work(4, 1000)
    assert expanding.memory_bytes == absorbed.memory_bytes
    assert expanding.matrix_flop == 4 * 1000 * (2 * 128 * 320 + 2 * up)
    assert forms["MHA"].work(4, 1000).memory_bytes == 4 * 1000 * 65536


@pytest.mark.parametrize("name", ["MLA, absorbed", "MLA, expanded at each step"])
def test_the_compiler_counts_what_the_formula_does(study, name, monkeypatch):
    """And softmax, and a selection for each number of the value."""
    form = study.forms(8)[name]
    monkeypatch.setattr(study, "forms", lambda heads: {name: form})
    (row,) = study.counts(8)["rows"]
    assert row["flop"] == form.flop(1)
    assert row["counted_flop"] == pytest.approx(row["flop"], rel=0.04)
    if not form.expands:
        beside = row["counted_flop"] - row["flop"] - form.layer.latent_rank
        assert 0 < beside <= 10 * 8


def test_forms_of_mla_give_the_same(tiny, study):
    steps = {
        name: study.Steps(form, 2, 20)
        for name, form in tiny.forms(8).items()
        if name.startswith("MLA")
    }
    assert len(steps) == 3
    study.check_same(steps)
    first = next(iter(steps.values()))
    before = np.asarray(first.step())
    np.testing.assert_array_equal(first.step(), before)
    assert first._cache.n.tolist() == [19, 19]
    for wrong in (lambda: jnp.zeros((2, 1, 8)), lambda: jnp.full((2, 1, 8), jnp.nan)):
        steps["MLA, absorbed"].step = wrong
        with pytest.raises(RuntimeError, match="differ"):
            study.check_same(steps)


def measured(study, batch, length, sizes):
    """As `timed`, without a clock: every step takes a millisecond."""
    bandwidth = Bandwidth({"copy": 1e10, "update": 2e10, "read": 1e10})
    rows = []
    for name, form in study.forms(sizes.heads).items():
        about = {"batch": batch, "query_heads": sizes.heads, "length": length}
        nbytes, flop = batch * form.bytes_read(length, "f32"), batch * form.flop(length)
        rows.append(result.row(name, about, nbytes, flop, Timing(1, (1e-3,) * 3), bandwidth))
    return {
        "bandwidth": bandwidth.figures(),
        "product_flop_per_second": 1e11,
        "rows": rows,
    }


def test_a_page_says_what_the_figures_do(study, monkeypatch, tmp_path):
    rows = [{"form": "MHA", "flop": 4096, "counted_flop": 5192.0}]
    monkeypatch.setattr(study, "counts", lambda heads: {"heads": heads, "rows": rows})
    monkeypatch.setattr(study, "timed", lambda *given: measured(study, *given))
    path = study.main(["--quick", "--out", str(tmp_path)])
    assert {found.name for found in tmp_path.iterdir()} == {
        f"mla_work_per_byte.{end}" for end in ("json", "md", "png")
    }
    page = path.with_suffix(".md").read_text()
    for says in (
        "242 FLOP for each byte, where MHA does 1 and MQA 128",
        "above the ridge of H200, TPU-v5e and TPU-v5p",
        "below that of H100-SXM, B300, TPU-v6e and TPU-7x",
        "a token takes 81,920 bytes, 71 times as many as its latent",
        "multiplies 121 times as much: 29,198 FLOP/B",
        "| MLA, absorbed | 1,152 | 278,528 |  | 242 | memory | matrix | memory | matrix |",
        "as many bytes as MLA, 1,152, with 128 and 56.9 FLOP/B",
        "| MHA | 8 | 4,096 | 5,192 | 1.268 |",
        "Absorbed MLA took 1.00 to 1.00 times as long as MHA",
        "was 5.00 to 5.00 FLOP/B",
        "**GPU figures are pending**",
        "python experiments/mla_work_per_byte.py --quick",
    ):
        assert says in page, says
    figures = json.loads(path.read_text())
    assert [table["name"] for table in figures["tables"]] == ["2 x 64 tokens", "1 x 128 tokens"]
    assert all(f"## By the clock: {t['name']}, 8 heads, f32\n" in page for t in figures["tables"])
    assert str(tmp_path) not in path.read_text()


def test_floors_are_those_of_sizing(study):
    """Forms without up-projections, against a model of one layer; and the ceiling that binds."""
    found = {(row["form"], row["batch"], row["tokens"]): row for row in study.floors()}
    one = study.sizing.ModelSpec("one layer", 8192, (study.forms(128)["GQA-8"].layer,))
    for batch, tokens in study.STEPS:
        for chip, seconds in found["GQA-8", batch, tokens]["seconds"].items():
            assert seconds == one.decode_floor(chip, tokens, batch, weight_bytes=0).seconds
    long = found["MLA, absorbed", 64, 32_768]["binds"]
    assert (long["H200"], long["H100-SXM"]) == ("matrix", "memory")


@pytest.mark.slow
def test_all_of_the_code_runs(study, tiny, tmp_path):
    path = study.main(["--quick", "--out", str(tmp_path)])
    assert path.with_suffix(".png").stat().st_size < 150_000
    assert json.loads(path.read_text())["seconds"] > 0
