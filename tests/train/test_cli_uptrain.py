"""``kvjax uptrain`` as a user runs it."""

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvjax import cli
from kvjax.models import save
from kvjax.train import UptrainConfig, uptrain

ROOT = Path(__file__).parents[2]


def run(*arguments):
    return subprocess.run(
        [sys.executable, "scripts/uptrain.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def place(tiny, stream, tmp_path):
    save(tiny, tmp_path / "src")
    np.save(tmp_path / "data.npy", stream)
    return tmp_path


def test_json_on_standard_output_and_progress_beside_it(place):
    files = (place / "src", place / "dst", "--data", place / "data.npy")
    more = ("--held-out", place / "data.npy", "--seq-len", 16, "--learning-rate", 0.01)
    done = run(*files, *more, "--alpha", 0.5, "--pretrain-tokens", 1024, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["steps"] == 4
    assert figures["held_out_after"] < figures["held_out_before"]
    assert "4/4" in done.stderr
    assert "loss" in done.stderr
    assert (place / "dst" / "model.safetensors").exists()


def test_one_clear_error(place):
    done = run(place / "src", place / "dst", "--data", place / "data.npy", "--steps", 3)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"kvjax: {place / 'data.npy'} is too short: 421 tokens, at least 513 are needed"
    )
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in place.iterdir()) == ["data.npy", "src"]


def test_help_shows_an_example():
    done = run("--help")
    assert done.returncode == 0
    assert "kvjax uptrain smollm2-mqa" in done.stdout


def test_defaults_are_those_of_the_library():
    command = inspect.signature(cli.uptrain).parameters
    library = {field.name: field.default for field in dataclasses.fields(UptrainConfig)}
    library["save_every"] = inspect.signature(uptrain).parameters["save_every"].default
    shared = library.keys() & command.keys()
    assert len(shared) == 17
    assert {name: command[name].default for name in shared} == {k: library[k] for k in shared}
