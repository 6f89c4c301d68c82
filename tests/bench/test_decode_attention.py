import json
import subprocess
import sys

import numpy as np
import pytest

from kvjax.bench import decode_attention, machine
from kvjax.bench.case import Case
from kvjax.bench.decode_attention import CONTENDERS, measure
from kvjax.bench.peers import Contender

pytestmark = pytest.mark.usefixtures("quick")
CASE = Case(2, 4, 2, 8, length=6, capacity=6, codec="f32")
OTHER = Case(2, 4, 1, 8, length=6, capacity=8, codec="bf16")


def test_a_run(fake_torch):
    rounds = []
    figures = measure(
        {CASE: CONTENDERS, OTHER: ("kvjax",)},
        rounds=3,
        seed=5,
        torch_python=fake_torch,
        on_round=rounds.append,
    )
    assert json.loads(json.dumps(figures)) == figures
    assert rounds == [1, 1, 1]
    assert figures["subject"] == "decode attention"
    assert figures["settings"] == {"rounds": 3, "seed": 5}
    assert figures["absent"] == {}
    assert figures["machine"]["versions"]["torch"] == "0.fake"
    assert set(figures["bandwidth"]["bytes_per_second"]) == {"copy", "update", "read"}
    shapes = [(row["contender"], row["kv_heads"], row["capacity"]) for row in figures["rows"]]
    assert shapes == [*((name, 2, 6) for name in CONTENDERS), ("kvjax", 1, 8)]
    for row in figures["rows"]:
        check_arithmetic(row, figures["bandwidth"])
    assert figures["rows"][0]["bytes_per_step"] == 2 * 2 * 6 * 16 * 4
    assert figures["rows"][0]["flop_per_step"] == 2 * 2 * 4 * 6 * 16
    ours, theirs = figures["rows"][0], figures["rows"][1]
    assert ours["seconds_over_kvjax"] == 1
    assert theirs["seconds_over_kvjax"] == theirs["median_seconds"] / ours["median_seconds"]


def check_arithmetic(row, bandwidth):
    assert len(row["sample_seconds"]) == 3
    assert row["median_seconds"] == np.median(row["sample_seconds"])
    rate = row["bytes_per_step"] / row["median_seconds"]
    best = bandwidth["bytes_per_second"][bandwidth["yardstick"]]
    assert row["bytes_per_second"] == pytest.approx(rate)
    assert row["share_of_copy"] == pytest.approx(rate / bandwidth["bytes_per_second"]["copy"])
    assert row["floor_seconds"] == pytest.approx(row["bytes_per_step"] / best)
    assert row["share_of_floor"] == pytest.approx(rate / best)
    assert row["intensity_flop_per_byte"] == row["flop_per_step"] / row["bytes_per_step"]
    assert row["tokens_per_second"] == pytest.approx(row["batch"] / row["median_seconds"])


def test_absent_peers_are_listed():
    figures = measure({CASE: ("torch", "kvjax")}, rounds=3, torch_python="/no/such/python")
    assert figures["absent"] == {"torch": "cannot run /no/such/python: No such file or directory"}
    assert [row["contender"] for row in figures["rows"]] == ["kvjax"]
    assert "torch" not in figures["machine"]["versions"]


@pytest.mark.parametrize("wrong", [0.0, 1.01, np.nan])
def test_contenders_that_differ_are_an_error(monkeypatch, wrong):
    build = decode_attention.BUILDERS["kvjax"]

    def scaled(case, inputs):
        return Contender(lambda calls: 1.0, build(case, inputs).output * wrong)

    monkeypatch.setitem(decode_attention.BUILDERS, "jax.nn", scaled)
    with pytest.raises(RuntimeError, match=r"jax.nn and kvjax differ by .* of the largest output"):
        measure({CASE: ("kvjax", "jax.nn")}, rounds=3)


def test_unknown_contender():
    with pytest.raises(ValueError, match=r"peer 'jaxnn': accepted are kvjax, jax\.nn, flax\.nnx"):
        measure({CASE: ("kvjax", "jaxnn")})


def test_what_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(machine, "free_bytes", lambda: 2**30)
    large = Case(4, 32, 32, 128, length=2**17, capacity=2**17, codec="f32")
    with pytest.raises(ValueError, match=r"32\.0 GiB are needed at once, 1\.0 GiB are free"):
        measure({large: ("kvjax", "jax.nn")}, array_bytes=0)


def test_needs_neither_flax_nor_rich_nor_matplotlib():
    program = """if True:
        import sys
        sys.modules.update(flax=None, rich=None, matplotlib=None)
        from kvjax.bench import case, decode_attention
        plan = {case.Case(1, 2, 1, 8, 4, 4, "f32"): ("kvjax", "flax.nnx")}
        run = decode_attention.measure(plan, rounds=3)
        print(len(run["rows"]), run["absent"]["flax.nnx"])
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("1 not installed: import of flax halted"), done.stderr
