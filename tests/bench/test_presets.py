from dataclasses import asdict

import pytest

from kvjax.bench import decode_attention, presets
from kvjax.bench.case import Case
from kvjax.bench.decode_attention import CONTENDERS
from kvjax.bench.presets import PRESETS, Bound

CASE = Case(1, 2, 1, 8, length=4, capacity=4, codec="f32")


def rows(**seconds):
    return [asdict(CASE) | {"contender": n, "median_seconds": s} for n, s in seconds.items()]


@pytest.mark.parametrize(
    ("measured", "ratio", "holds"),
    [
        (rows(ours=2.0, theirs=8.0), 0.25, True),
        (rows(ours=2.1, theirs=8.0), 0.2625, False),
        (rows(ours=2.0), None, None),
    ],
)
def test_bound(measured, ratio, holds):
    bound = Bound("quick", (CASE, "ours"), (CASE, "theirs"), 0.25)
    assert bound.figures(measured) == {
        "says": "quick",
        "ratio": ratio,
        "most": 0.25,
        "holds": holds,
    }


def test_acceptance_measures_both_sides_of_every_bound():
    preset = PRESETS["acceptance"]
    assert len(preset.bounds) == 6
    for bound in preset.bounds:
        for case, contender in (bound.of, bound.over):
            assert contender in preset.plan[case]
    full = [case for case, names in preset.plan.items() if names == CONTENDERS]
    assert [case.codec for case in full] == ["f32", "bf16"]
    assert {case.bytes_per_step for case in full} == {2**28, 2**27}


def test_caches_measures_both_sides_of_every_bound():
    preset = PRESETS["caches"]
    assert {case.layout for case in preset.plan} == {"dense", "paged:16", "auto"}
    for bound in preset.bounds:
        assert {bound.of[0], bound.over[0]} <= set(preset.plan)
    with pytest.raises(ValueError, match="torch_python: got 'python3'; preset 'caches' has no"):
        presets.run("caches", torch_python="python3")


@pytest.mark.usefixtures("quick")
def test_run_judges_the_preset(monkeypatch):
    same = Bound("same", *[(CASE, "kvjax")] * 2, 1.0)
    preset = presets.Preset(decode_attention.measure, {CASE: ("kvjax",)}, [same], peers=True)
    monkeypatch.setitem(PRESETS, "tiny", preset)
    figures = presets.run("tiny", rounds=3)
    assert figures["settings"]["preset"] == "tiny"
    assert figures["bounds"] == [{"says": "same", "ratio": 1.0, "most": 1.0, "holds": True}]


def test_unknown_preset():
    with pytest.raises(ValueError, match="preset='fast': accepted are acceptance"):
        presets.run("fast")
