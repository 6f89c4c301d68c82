"""The script as it is called, on a CPU; and workers that hang or die."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvjax.bench.gpu.journal import Journal

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_gpu.py"


@pytest.fixture
def script():
    module_spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def run(out, *options, timeout=120):
    """The exit status, what was printed, and the figures."""
    command = [sys.executable, str(SCRIPT), f"--out={out}", *options]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=out.parent
    )
    assert ended.stderr == ""
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    return ended.returncode, ended.stdout, json.loads(out.read_text())


def test_a_check_is_interpreted(tmp_path):
    status, said, figures = run(tmp_path / "gpu.json", "--interpret", "--only=^check: group 8$")
    assert status == 0
    (check,) = figures["checks"]
    assert check["passed"]
    assert 0 < check["difference"]["out"] < check["tolerance"]["out"]
    assert "ok      check: group 8" in said
    assert figures["rows"] == figures["failures"] == figures["not_run"] == []
    assert figures["machine"]["backend"] == "cpu"
    assert str(tmp_path) not in (tmp_path / "gpu.json").read_text()


@pytest.mark.slow
def test_all_checks_are_interpreted(tmp_path):
    options = ("--interpret", "--seconds=1500", "--jobs=1")
    status, _, figures = run(tmp_path / "gpu.json", *options, timeout=1600)
    assert figures["failures"] == []
    assert status == 0
    assert len(figures["checks"]) > 50


def test_points_are_timed_at_tiny_sizes(tmp_path):
    only = "--only=^(article|peers): B. N8 K8|^fewer bytes.*(head scales|x2)$|^check: window 1$"
    status, said, figures = run(tmp_path / "gpu.json", "--quick", only)
    rows = [row for row in figures["rows"] if "error" not in row]
    assert {row["contender"] for row in rows} == {"kvjax", "kvjax xla"}
    assert all(row["agrees"] for row in rows)
    # Without a GPU no kernel can pass, and the rows of its kind say so.
    assert status == 1
    assert figures["failures"] == [
        "check: window 1: ValueError: implementation='mosaic_gpu': it needs an NVIDIA GPU, or "
        "interpret=True; accepted here are None, 'xla', 'reference'"
    ]
    for row in rows:
        doubtful = row["contender"] == "kvjax" and row["kernel"] == "bf16"
        assert row["valid"] == (not doubtful)
    assert {gain["by"] for gain in figures["fewer_bytes"]} == {
        *("fp8_e4m3, head scales", "int8, head scales", "two layers share one cache")
    }
    assert "jax triton  B2 N8 K8 H128 256 bf16" in said
    assert figures["bandwidth"][0]["bytes_per_second"]["copy"] > 0


def test_no_time_is_said(tmp_path):
    status, said, figures = run(tmp_path / "gpu.json", "--quick", "--seconds=0", "--only=: B")
    assert status == 0
    assert len(figures["not_run"]) > 20
    assert "not run for want of time" in said


WORKER = """
    import os, sys, time
    from kvjax.bench.gpu.journal import Journal
    journal = Journal({path})
    for name in "abcd":
        if name not in journal.begun():
            with journal.case(name, kernel="bf16"):
                if name == "b":
                    print("it says why", flush=True)
                    os._exit(7)
                if name == "c":
                    time.sleep(60)
                journal.write("row", name=name)
"""


@pytest.fixture
def worker(tmp_path):
    """A command whose worker dies in one case and hangs in another, and its journal."""
    journal = Journal(tmp_path / "run.jsonl")
    program = textwrap.dedent(
        WORKER.format(path=f"__import__('pathlib').Path({str(journal.path)!r})")
    )
    return [sys.executable, "-c", program], journal


def supervised(script, command, journal, stall=5.0, end=None):
    """Entries that were given, and why the worker was lost."""
    given = []
    steps = script.supervise(command, dict(os.environ), journal, stall, end or time.time() + 60)
    while True:
        try:
            given.append(next(steps))
        except StopIteration as stop:
            return given, stop.value


def test_workers_go_on_behind_the_case_that_was_lost(script, worker):
    command, journal = worker
    given, reason = supervised(script, command, journal)
    assert [entry.get("name") for entry in given] == ["a", "a", "a", "b"]
    assert reason == "the process ended with status 7; its last messages: it says why\n"
    journal.lose(reason)
    started = time.time()
    _, reason = supervised(script, command, journal, stall=3.0)
    assert reason.startswith("no sign of life for 3 s")
    assert time.time() - started < 30
    journal.lose(reason)
    given, reason = supervised(script, command, journal)
    assert reason is None
    assert given[-1] == {"kind": "end", "name": "d"}
    assert [entry["name"] for entry in journal.of("lost")] == ["b", "c"]
    assert [entry["name"] for entry in journal.of("row")] == ["a", "d"]
    assert [path.name for path in journal.path.parent.iterdir()] == ["run.jsonl"]


def test_a_worker_is_stopped_when_time_is_up(script, worker):
    command, journal = worker
    for name in "ab":
        journal.write("begin", name=name)
    _, reason = supervised(script, command, journal, stall=60.0, end=time.time() + 3)
    assert reason.startswith("time was up")


def test_the_parent_restarts_a_stage_with_one_job(script, monkeypatch, tmp_path):
    """What was lost is written, and the next worker compiles one program at a time."""
    journal, commands = Journal(tmp_path / "run.jsonl"), []

    def supervise(command, *_):
        commands.append(command)
        journal.write("begin", name=f"x{len(commands)}", kernel="bf16")
        yield from ()
        return "it hung" if len(commands) < 3 else None

    monkeypatch.setattr(script, "supervise", supervise)
    given = script.parse(["--jobs=4", "--only=^x"])
    entries = list(script.run_stage("main", given, journal, time.time() + 60))
    assert [entry["kind"] for entry in entries] == ["lost", "lost"]
    assert [[part for part in one if "jobs" in part] for one in commands] == [
        *([["--jobs=4"]]),
        *([["--jobs=1"]] * 2),
    ]
    commands.clear()
    list(script.run_stage("main", given, journal, time.time() - 1))
    assert len(commands) == 1, "no other when time is up"


def test_a_worker_that_begins_nothing_is_not_started_again(tmp_path):
    """As on a machine without a GPU, where a whole run would take hours."""
    status, said, figures = run(tmp_path / "gpu.json", "--only=^check")
    assert status == 1
    (failure,) = figures["failures"]
    assert failure.startswith("between cases: the process ended with status 1; its last messages: ")
    assert "jax finds no GPU; on a CPU, --interpret and --quick can be run" in failure
    assert "LOST    between cases" in said


def test_only_whole_runs_are_kept_with_the_results(script):
    assert script.default_directory(script.parse([])) == script.RESULTS
    for option in ("--quick", "--interpret", "--only=x"):
        assert script.default_directory(script.parse([option])) != script.RESULTS
