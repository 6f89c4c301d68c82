"""The checker as a whole: its table, its processes, and what it makes of their results."""

import itertools
import json
import os
import sys
from pathlib import Path

import check_kernels
import pytest
from kernel_check import baseline, cases, running
from kernel_check.budgets import Fault
from kernel_check.running import Result, Run
from kernel_check.targets import TARGETS

ROOT = Path(__file__).parents[2]
# A worker that says what it is told to by the names of its rows.
WORKER = """
import json, os, sys, time
print(json.dumps({"versions": {"ptxas": "1"}}), flush=True)
for name in json.loads(sys.stdin.readline()):
    print(json.dumps({"begin": name}), flush=True)
    if name == "dies":
        print("LLVM ERROR: cannot select", file=sys.stderr, flush=True)
        os.abort()
    if name == "hangs":
        time.sleep(60)
    faults = [["spill", "4 bytes"]] if name == "spills" else []
    print(json.dumps({"done": name, "facts": {"loop": 7}, "faults": faults}), flush=True)
"""


class TestTable:
    @pytest.mark.parametrize("target", TARGETS)
    def test_names_are_unique_and_those_of_the_subset_among_all(self, target):
        every = [row.name for row in cases.rows(target, subset=False)]
        few = [row.name for row in cases.rows(target, subset=True)]
        assert len({*every}) == len(every)
        assert {*few} <= {*every}
        assert not every or len(few) < len(every)

    def test_the_subset_has_every_pair(self):
        every = cases.every("wgmma")

        def pairs(some):
            return {frozenset(p) for c in some for p in itertools.combinations(c.axes, 2)}

        few = cases.pairwise(every)
        assert pairs(few) == pairs(every)
        assert pairs(few[:-1]) != pairs(every)
        axes = {axis for c in every for axis in c.axes}
        assert {axis for c in cases.each(every) for axis in c.axes} == axes

    def test_all_that_is_shipped_is_there(self):
        every = cases.every("wgmma")
        for attribute, values in {
            "storage": cases.STORAGES,
            "dims": cases.DIMS,
            "group": cases.KV_HEADS,
            "page": cases.PAGES,
            "rules": cases.RULES,
        }.items():
            assert {getattr(case, attribute) for case in every} == {*values}

    def test_each_row_that_must_fail_can_be_made(self):
        from kernel_check.negatives import MAKERS

        named = {negative.fault for rows in cases.NEGATIVES.values() for negative in rows}
        assert named == MAKERS.keys()


def run(*names, seconds=20):
    return running.run(
        "h100",
        names,
        seconds=seconds,
        command=[sys.executable, "-c", WORKER],
        environment=lambda dump: dict(os.environ),
    )


class TestProcesses:
    def test_results(self):
        found = run("a", "spills")
        assert found.versions == {"ptxas": "1"}
        assert [(r.name, r.facts, r.faults) for r in found.results] == [
            ("a", {"loop": 7}, ()),
            ("spills", {"loop": 7}, (Fault("spill", "4 bytes"),)),
        ]

    def test_one_that_dies_loses_its_own_row_alone(self):
        found = run("a", "dies", "b")
        assert [r.name for r in found.results] == ["a", "dies", "b"]
        a, dies, b = found.results
        assert (a.faults, b.faults) == ((), ())
        [fault] = dies.faults
        assert fault.kind == "died"
        assert "LLVM ERROR: cannot select" in fault.text

    def test_one_that_hangs_is_ended(self):
        [hangs, b] = run("hangs", "b", seconds=1.0).results
        assert hangs.faults == (Fault("died", "nothing was heard for 1 s: "),)
        assert not b.faults

    def test_one_that_cannot_start_is_an_error(self):
        with pytest.raises(RuntimeError, match=r"no row of h100 was begun.*no_such_module"):
            running.run(
                "h100",
                ["a"],
                seconds=20,
                command=[sys.executable, "-m", "no_such_module"],
                environment=lambda dump: dict(os.environ),
            )

    def test_compilers_that_are_missing_are_named(self, tmp_path, monkeypatch):
        monkeypatch.setattr(running.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(RuntimeError, match=r"make check-kernels"):
            running.environment_of_worker(tmp_path)


NEGATIVE = cases.Negative("a fault", ("spill", "died"), "bytes|status")


class TestJudgement:
    @pytest.mark.parametrize(
        ("faults", "passes"),
        [
            ([], False),
            ([Fault("spill", "4 bytes")], True),
            ([Fault("spill", "local memory")], False),
            ([Fault("shared memory", "4 bytes")], False),
            ([Fault("shared memory", "x"), Fault("died", "with status 6")], True),
        ],
    )
    def test_a_row_that_must_fail(self, faults, passes):
        wrong = check_kernels.judged([NEGATIVE], [Result(NEGATIVE.name, {}, tuple(faults))])
        assert (not wrong) == passes

    def test_any_other_row(self):
        row = cases.StepCase("bf16", None)
        assert not check_kernels.judged([row], [Result(row.name)])
        wrong = check_kernels.judged([row], [Result(row.name, {}, (Fault("copies", "two"),))])
        assert wrong == {"step bf16": ["copies: two"]}


class TestMain:
    @pytest.fixture
    def results(self, monkeypatch, tmp_path):
        """What workers find, by row; a good run of the subset if it is not changed."""
        good = {
            row.name: Result(row.name, {} if isinstance(row, cases.Negative) else {"loop": 100})
            for row in cases.rows("b200", subset=False)
        }
        for negative in cases.NEGATIVES["b200"]:
            fault = Fault(negative.kinds[0], "bytes of spills, wgmma")
            good[negative.name] = Result(negative.name, {}, (fault,))

        def found(target, names, **_):
            return Run({"ptxas": "1"}, [good[name] for name in names])

        monkeypatch.setattr(check_kernels, "run", found)
        monkeypatch.setattr(baseline.read, "__defaults__", (tmp_path / "baseline.json",))
        monkeypatch.setattr(baseline.write, "__defaults__", (tmp_path / "baseline.json",))
        return good

    def test_what_is_not_in_the_baseline_fails_until_it_is(self, results, capsys, tmp_path):
        arguments = ["--target", "b200", "--subset"]
        assert check_kernels.main(arguments) == 1
        assert "not in the baseline" in capsys.readouterr().out
        assert check_kernels.main([*arguments, "--update"]) == 0
        assert check_kernels.main(arguments) == 0
        results["mma latent N16"] = Result("mma latent N16", {"loop": 111})
        report = tmp_path / "report.json"
        assert check_kernels.main([*arguments, "--json", str(report)]) == 1
        said = capsys.readouterr().out
        assert "mma latent N16  loop    100       111" in said
        [difference] = json.loads(report.read_text())["b200"]["differences"]
        assert difference == {"name": "mma latent N16", "fact": "loop", "was": 100, "found": 111}

    def test_an_update_does_not_excuse_faults(self, results, capsys):
        assert check_kernels.main(["--target", "b200", "--update"]) == 0
        faulty = Result("step bf16", {"loop": 200}, (Fault("copies", "two"),))
        results["step bf16"] = faulty
        assert check_kernels.main(["--target", "b200", "--update"]) == 1
        assert "FAIL  step bf16\n          copies: two" in capsys.readouterr().out
        # Nor does it keep their figures.
        assert baseline.read().targets["b200"]["step bf16"] == {"loop": 100}

    def test_a_fault_that_is_not_found_fails(self, results, capsys):
        negative = cases.NEGATIVES["b200"][0]
        check_kernels.main(["--target", "b200", "--update"])
        results[negative.name] = Result(negative.name, {})
        assert check_kernels.main(["--target", "b200"]) == 1
        assert f"FAIL  {negative.name}\n          no fault of kind" in capsys.readouterr().out

    def test_rows_by_name(self, results):
        only = ["--target", "b200", "--only", "^step"]
        assert check_kernels.main([*only, "--update"]) == 0
        assert baseline.read().targets["b200"].keys() == {step.name for step in cases.STEPS}
        assert check_kernels.main(only) == 0

    def test_a_list(self, capsys):
        assert check_kernels.main(["--list", "--target", "h100", "--only", "latent"]) == 0
        listed = capsys.readouterr().out
        assert "  wgmma latent N128 P64\n" in listed
        assert "bf16" not in listed


def test_pins_are_those_of_the_tests():
    """The kernels are checked with the versions of everything else that the tests run with."""

    def pins(name):
        lines = (line.strip() for line in (ROOT / name).read_text().splitlines())
        return dict(line.split("==") for line in lines if line and not line.startswith("#"))

    kernels, tests = pins("requirements-kernels.txt"), pins("constraints.txt")
    shared = kernels.keys() & tests.keys()
    assert {name: kernels[name] for name in shared} == {name: tests[name] for name in shared}
    assert {"jax", "jaxlib", "flax", "numpy"} <= shared
    assert kernels["jax-cuda13-plugin"] == kernels["jax-cuda13-pjrt"] == kernels["jax"]
    assert kernels["nvidia-cuda-nvcc"] == kernels["nvidia-nvvm"]
