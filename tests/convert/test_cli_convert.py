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
from kvjax.convert import to_gqa, to_mla

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
    of_mla = {"model_type", "seed", "calibrate_on", "calibrate_tokens"}
    for function, own in (
        (to_gqa, {"method", "seed", "allow_kvjax_only"}),
        (to_mla, of_mla | {"way"}),
    ):
        library = inspect.signature(function).parameters
        shared = library.keys() & command.keys() - {"kv_heads", "latent_rank", "rope_dim"}
        assert shared == {"evaluate_on", "evaluate_tokens"} | own
        # Ways are named on the command line.
        defaults = {
            name: getattr(library[name].default, "name", library[name].default) for name in shared
        }
        assert {name: command[name].default for name in shared} == defaults


MLA = ("--to", "mla", "--calibrate-tokens", 64, "--evaluate-tokens", 32)


def test_a_table_of_ranks_makes_no_directory(golden, tmp_path):
    command = ["convert", golden / "llama_gqa_tied", *MLA, "--rope-dim", 16]
    command += ["--latent-rank", "24,12"]
    done = CliRunner().invoke(cli.app, [str(part) for part in command])
    assert done.exit_code == 0, done.output
    table = [line.replace("│", " ").split() for line in done.stdout.splitlines()]
    rows = [row for row in table if row[:1] in (["24"], ["12"])]
    assert [row[:2] for row in rows] == [["24", "160"], ["12", "112"]]
    assert float(rows[0][4]) < float(rows[1][4])
    assert [row[-1] for row in rows] == ["no" if float(row[4]) >= 1 else "yes" for row in rows]
    assert not list(tmp_path.iterdir())


def test_a_directory_with_latents(run, tmp_path):
    given = ("--latent-rank", 20, "--rope-dim", 8, "--way", "mha2mla", "--select", "high")
    done = run("llama_gqa_tied", *MLA, *given, "--json")
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures["settings"] == {"select": "high", "svd": "joint"}
    assert (figures["latent_rank"], figures["rope_heads"], figures["rope_dim"]) == (20, 2, 8)
    assert figures["comparison"]["tokens"] == 32
    assert json.loads((tmp_path / "dst" / "config.json").read_text())["kv_lora_rank"] == 20


BAD = {
    "heads of mla": ((*MLA, "--kv-heads", 1), "kv_heads: got 1; accepted with --to gqa alone"),
    "ranks of gqa": (("--latent-rank", 8), "latent_rank: got '8'; accepted with --to mla alone"),
    "no rank": ((*MLA, "--rope-dim", 8), "latent_rank: absent; needed with --to mla"),
    "no heads": ((), "kv_heads: absent; needed with --to gqa"),
    "several": (
        (*MLA, "--rope-dim", 8, "--latent-rank", "8,9"),
        "latent_rank: got 2 of them; accepted: one for a directory to make, or several without "
        "DST, for a report",
    ),
    "no number": (
        (*MLA, "--rope-dim", 8, "--latent-rank", "8,half"),
        "latent_rank: got '8,half'; accepted: whole numbers, as in 192,128",
    ),
    "of another way": (
        (*MLA, "--rope-dim", 8, "--latent-rank", 8, "--svd", "split"),
        "svd: got 'split'; accepted with --way mha2mla alone",
    ),
    "way": ((*MLA, "--rope-dim", 8, "--latent-rank", 8, "--way", "x"), "way: got 'x'; accepted: "),
    "to": (("--to", "gta"), "to: got 'gta'; accepted: gqa, mla"),
    "as": (
        (*MLA, "--rope-dim", 8, "--latent-rank", 8, "--as", "deepseek_v3"),
        "model_type: got 'deepseek_v3'; accepted: kvjax_mla. Classes of other libraries, such as "
        "deepseek_v3, always norm the latent",
    ),
}


@pytest.mark.parametrize(("given", "message"), BAD.values(), ids=BAD)
def test_options_that_do_not_fit(given, message, run, tmp_path):
    done = run("llama_gqa_tied", *given)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith(f"kvjax: {message}")
    assert not list(tmp_path.iterdir())
