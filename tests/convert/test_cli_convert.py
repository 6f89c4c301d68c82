"""``kvjax convert`` as a user runs it."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvjax import cli
from kvjax.convert import to_gqa

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(golden, tmp_path):
    """The command on a golden model and a new directory."""

    def run(name, *arguments):
        command = ["convert", str(golden / name), str(tmp_path / "dst"), *map(str, arguments)]
        return CliRunner().invoke(cli.app, command)

    return run


def test_the_script_prints_json_and_progress_beside_it(golden, tmp_path):
    options = ["--kv-heads", "1", "--evaluate-tokens", "16", "--json"]
    directories = [golden / "qwen3_mha", tmp_path / "dst"]
    done = subprocess.run(
        [sys.executable, "scripts/convert_mha_to_gqa.py", *directories, *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["kv_heads_after"] == 1
    assert figures["comparison"]["tokens"] == 16
    assert "converting" in done.stderr
    assert "comparing" in done.stderr
    assert (tmp_path / "dst" / "model.safetensors").exists()


def test_table(run):
    done = run("qwen3_mha", "--kv-heads", 2, "--no-evaluate")
    assert done.exit_code == 0, done.output
    assert "4 → 2 (mean)" in done.stdout
    assert "KL" not in done.stdout
    assert "mean of their RMSNorms" in " ".join(done.stdout.split())


def test_one_clear_error(run, tmp_path):
    done = run("llama_mha", "--kv-heads", 3)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == (
        "kvjax: kv_heads=3 does not divide the checkpoint's 4 KV heads; accepted: 1, 2, 4"
    )
    assert not list(tmp_path.iterdir())


def test_a_directory_that_only_kvjax_loads(run, tmp_path):
    done = run("gpt2_conv1d", "--kv-heads", 2, "--allow-kvjax-only", "--no-evaluate", "--json")
    assert json.loads(done.stdout)["model_type"] == "kvjax_gpt2"


def test_help_shows_an_example():
    done = CliRunner().invoke(cli.app, ["convert", "--help"])
    assert "kvjax convert llama-2-7b llama-2-7b-gqa --kv-heads 8" in done.stdout


def test_defaults_are_those_of_the_library():
    command = inspect.signature(cli.convert).parameters
    library = inspect.signature(to_gqa).parameters
    shared = library.keys() & command.keys() - {"kv_heads"}
    assert shared == {"method", "seed", "allow_kvjax_only", "evaluate_on", "evaluate_tokens"}
    assert all(command[name].default == library[name].default for name in shared)
