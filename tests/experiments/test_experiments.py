"""The experiments: their parts, and, where slow, all of their code on the shipped model."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
MODEL = EXPERIMENTS.parent / "kvjax" / "data" / "demo_model"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module


def test_a_run_that_was_cut_short_goes_on(load, tmp_path, capsys):
    """What is measured is not measured again; files appear whole, and the journal goes."""
    common = load("common")
    calls, broken = [], [True]

    def one(name):
        calls.append(name)
        if name == "second" and broken:
            raise RuntimeError("cut short")
        return {"figure": len(name) + 0.5}

    def measure(setup):
        return {"rows": [setup.measured(name, one, name) for name in ("first", "second")]}

    trial = common.Experiment(
        "trial", "A trial", "About it.", measure, lambda figures: ["A page."], lambda _: Figure()
    )
    arguments = ["--model", str(MODEL), "--out", str(tmp_path)]
    with pytest.raises(RuntimeError, match="cut short"):
        trial.main(arguments)
    assert [path.name for path in tmp_path.iterdir()] == [".trial.partial.json"]
    broken.clear()
    path = trial.main([*arguments, "--resume"])
    assert calls == ["first", "second", "second"]
    assert {path.name for path in tmp_path.iterdir()} == {"trial.json", "trial.md", "trial.png"}
    figures = json.loads(path.read_text())
    assert [row["figure"] for row in figures["rows"]] == [5.5, 6.5]
    assert figures["command"] == "python experiments/trial.py --model demo_model"
    assert figures["text"] == "kvjax/data/kjv_heldout.txt"
    assert str(MODEL.parent) not in path.read_text()
    page = (tmp_path / "trial.md").read_text()
    assert page.startswith("# A trial\n\nAbout it.\n\nA page.\n\nMeasured with demo_model")
    assert "first: figure 5.5" in capsys.readouterr().err


def test_quantised_by_channel_and_by_token(load):
    """Against a loop over groups; a group of equal numbers stays as it is."""
    quantised = load("kivi_asymmetry").quantised
    x = np.random.default_rng(0).normal(size=(2, 64, 32)).astype(np.float32)
    x[0, :32, 5] = 3.0
    for by_channel in (True, False):
        want = np.empty_like(x)
        for b in range(2):
            for start in range(0, 64, 32):
                block = x[b, start : start + 32]
                axis = 0 if by_channel else 1
                low, high = block.min(axis, keepdims=True), block.max(axis, keepdims=True)
                scale = np.where(high > low, (high - low) / 3, 1)
                want[b, start : start + 32] = np.round((block - low) / scale) * scale + low
        got = np.asarray(quantised(x, 3, by_channel))
        np.testing.assert_allclose(got, want, atol=1e-5)
        assert len(np.unique(got[1, :32, 0] if by_channel else got[1, 0])) <= 4


def test_what_is_on_the_front(load):
    """A point stays unless another is as good in both and better in one."""
    beats = load("pareto")._beats
    points = [
        {"cache_bytes_per_row": size, "kl": kl} for size, kl in ((4, 1), (4, 2), (2, 2), (1, 9))
    ]
    front = [one for one in points if not any(beats(two, one) for two in points)]
    assert [(one["cache_bytes_per_row"], one["kl"]) for one in front] == [(4, 1), (2, 2), (1, 9)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("attention_sinks", "codec_divergence", "eviction", "kivi_asymmetry"),
        *("mla_conversion", "needle", "pareto"),
    ],
)
def test_all_of_the_code_runs(load, name, tmp_path):
    arguments = ["--quick", "--model", str(MODEL), "--out", str(tmp_path)]
    path = load(name).EXPERIMENT.main(arguments)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.{end}" for end in FILES}
    assert (tmp_path / f"{name}.png").stat().st_size < 150_000
    figures = json.loads(path.read_text())
    assert figures["model"] == "demo_model"
    assert figures["seconds"] > 0


FILES = ("json", "md", "png")
