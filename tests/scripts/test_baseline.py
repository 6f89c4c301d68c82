"""The baseline: what differs from it, and how it is written."""

import json

import pytest
from kernel_check import baseline
from kernel_check.baseline import Baseline, Difference, differences, updated

VERSIONS = {"jax": "0.12", "ptxas": "13.5"}
FACTS = {"registers": 100, "shared": 1000, "products": {"HGMMA": 16}, "loop": 200, "fences": 3}
OLD = Baseline(VERSIONS, {"h100": {"a": FACTS}})


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({}, []),
        ({"registers": 110, "loop": 180}, []),
        ({"registers": 111}, ["registers"]),
        ({"loop": 179}, ["loop"]),
        ({"shared": 1001}, ["shared"]),
        ({"fences": 2, "products": {"HGMMA": 17}}, ["fences", "products"]),
        ({"step": 5}, ["step"]),
    ],
)
def test_tolerances(change, differs):
    found = differences(OLD, "h100", VERSIONS, {"a": {**FACTS, **change}}, {"a"})
    assert [d.fact for d in found] == differs


def test_rows_that_come_and_go():
    new = {"b": FACTS, "c": FACTS}
    assert [*differences(OLD, "h100", VERSIONS, new, {"b", "c"})] == [
        Difference("a", "row", "in the baseline", "not in the table"),
        Difference("b and 1 more", "row", "not in the baseline", "in the table"),
    ]
    # Rows that did not run are not missed.
    assert not [*differences(OLD, "h100", VERSIONS, {}, {"a"})]


def test_other_compilers():
    other = {"jax": "0.12", "ptxas": "13.6"}
    found = [*differences(OLD, "h100", other, {"a": FACTS}, {"a"})]
    assert found == [Difference("compilers", "ptxas", "13.5", "13.6")]


def test_an_update_keeps_what_did_not_run():
    more = {**FACTS, "loop": 1}
    old = Baseline({}, {"h100": {"a": FACTS, "b": FACTS, "gone": FACTS}, "b200": {"x": FACTS}})
    new = updated(old, "h100", VERSIONS, {"b": more}, {"a", "b"})
    assert new == Baseline(VERSIONS, {"h100": {"a": FACTS, "b": more}, "b200": {"x": FACTS}})


def test_a_file_is_what_was_written(tmp_path):
    path = tmp_path / "baseline.json"
    assert baseline.read(path) == Baseline({}, {})
    many = Baseline(VERSIONS, {"h100": {"a b": FACTS, "a": FACTS}, "b200": {"x": FACTS}})
    baseline.write(many, path)
    assert baseline.read(path) == many
    assert [*tmp_path.iterdir()] == [path]
    # A row a line, so that a changed row is a changed line.
    assert sum(line.startswith('"a') for line in path.read_text().splitlines()) == 2


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "baseline.json"
    baseline.write(OLD, path)
    monkeypatch.setattr("pathlib.Path.rename", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        baseline.write(Baseline(VERSIONS, {}), path)
    assert json.loads(path.read_text())["targets"] == OLD.targets
