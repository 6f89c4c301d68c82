"""``kvjax size`` and ``kvjax plan`` as a user runs them."""

import json
import os
import subprocess
import sys

import pytest

import kvjax

LLAMA_2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_2_7B))
    return path


def run(*arguments: object, before: str = "") -> subprocess.CompletedProcess:
    """Run the command in a fresh interpreter, `before` first."""
    program = f"import sys; {before}\nfrom kvjax.cli import app; app(prog_name='kvjax')"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True
    )


def test_table(config):
    done = run("size", config, "--tokens", 8192)
    assert done.returncode == 0
    assert "524,288 B = 512 KiB" in done.stdout
    assert "4,294,967,296 B = 4 GiB" in done.stdout
    assert "6,738,415,616" in done.stdout


def test_directory_and_json(config):
    done = run("size", config.parent, "--tokens", 100, "--batch", 3, "--codec", "fp8", "--json")
    figures = json.loads(done.stdout)
    assert figures["bytes_per_token"] == 262_144
    assert figures["allocated_bytes"] == figures["read_per_step_bytes"] == 300 * 262_144
    assert figures["table_bytes"] == 32 * (3 * 5 + 2 * 4)  # the scales are kept once a layer
    assert figures["codec"] == "fp8_e4m3"
    assert figures["intensity_flop_per_byte"] == 2
    assert figures["parameters"] == 6_738_415_616
    assert figures["layers"][0]["count"] == 32
    assert "on_chip" not in figures


def test_chip(config):
    figures = json.loads(run("size", config, "--chip", "H200", "--json").stdout)["on_chip"]
    cache, table, parameters = 4096 * 524_288, 32000 * 4096, 6_738_415_616
    # The token table is not read in a step: only the rows of the tokens at hand.
    memory = ((parameters - table) * 2 + cache) / 4.8e12
    assert figures["ceiling_seconds"]["memory"] == pytest.approx(memory)
    assert figures["decode_floor_seconds"] == pytest.approx(memory)
    assert figures["tokens_per_second"] == pytest.approx(1 / memory)
    assert figures["tokens_that_fit_beside_weights"] == (141 * 10**9 - 2 * parameters) // 524_288
    assert "memory binds" in run("size", config, "--chip", "H200").stdout


def test_several_models_side_by_side(tmp_path, config):
    other = tmp_path / "gqa" / "config.json"
    other.parent.mkdir()
    other.write_text(json.dumps({**LLAMA_2_7B, "num_key_value_heads": 8}))
    done = run("size", config, other, "--tokens", 100, "--json")
    mha, gqa = json.loads(done.stdout)
    assert (mha["config"], gqa["config"]) == (tmp_path.name, "gqa")
    assert mha["allocated_bytes"] == 4 * gqa["allocated_bytes"] == 100 * 524_288
    table = run("size", config, other).stdout
    assert "gqa" in table
    assert "524,288 B" in table
    assert "131,072 B" in table


def test_definitions_and_shares(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**LLAMA_2_7B, "model_type": "mistral", "sliding_window": 4096})
    )
    windowed = {
        name: json.loads(
            run("size", tmp_path, "--tokens", 8192, "--definition", name, "--json").stdout
        )
        for name in ("kvjax", "hf-dynamic", "hf-static")
    }
    assert {name: figures["allocated_bytes"] for name, figures in windowed.items()} == {
        "kvjax": 4096 * 524_288,
        "hf-dynamic": 4095 * 524_288,
        "hf-static": 4096 * 524_288,
    }
    assert "allocated (hf-static)" in run("size", tmp_path, "--definition", "hf-static").stdout
    done = run("size", tmp_path, "--tokens", 100, "--batch", 4, "--tp", 2, "--dp", 2, "--pp", 2,
               "--page-size", 16, "--json")  # fmt: skip
    assert json.loads(done.stdout)["allocated_bytes"] == 2 * 112 * 524_288 // 4


def test_plot_of_bytes_against_context(tmp_path, config):
    pytest.importorskip("matplotlib")
    png = tmp_path / "bytes.png"
    assert run("size", config, "--plot", png).returncode == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    done = run("size", config, "--plot", tmp_path / "bytes.pdf")
    assert done.returncode == 1
    assert "accepted: a file name that ends in .png" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes.png", "config.json"]


def test_plan_of_a_batch_and_of_a_rate(tmp_path, config):
    done = run("plan", config, "--batch", 16, "--chip", "H200", "--chip", "TPU-v5e", "--json")
    h200, v5e = json.loads(done.stdout)["plans"]
    assert (h200["chips"], h200["batch"], h200["binds"]) == (1, 16, "memory")
    assert h200["cache_bytes"] == 16 * (8192 * 524_288 + 32 * 5)
    assert v5e["chips"] == 8
    done = run("plan", config, "--tokens", "2048:0.7,8192:0.3", "--tokens-per-second", 9000,
               "--chip", "H200", "--json")  # fmt: skip
    (found,) = json.loads(done.stdout)["plans"]
    assert found["tokens_per_second"] >= 9000
    table = run("plan", config, "--chip", "TPU-v5e", "--max-chips", 1, "--source-tokens", 7).stdout
    assert "too few" in table
    assert "8,192 tokens and a source of 7" in " ".join(table.split())
    assert "1 sequence of 8,192 tokens" in table


def test_plot_of_floor_against_batch(tmp_path, config):
    pytest.importorskip("matplotlib")
    png = tmp_path / "floor.png"
    assert run("plan", config, "--chip", "H200", "--plot", png).returncode == 0
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "long"], "--tokens 'long': accepted: a whole number, or lengths"),
        (["--tokens", "8:1,9:x"], "--tokens '8:1,9:x'"),
        (["--batch", "2", "--tokens-per-second", "5"], "batch: got 2 with tokens_per_second 5.0"),
        (["--weights", "int3"], "weights: got 'int3'"),
        (["--chip", "H300"], "chip: got 'H300'"),
    ],
)
def test_bad_plans_give_one_line(config, arguments, message):
    done = run("plan", config, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"kvjax: {message}")
    assert done.stderr.count("\n") == 1


def test_a_window_everywhere_has_no_limit(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**LLAMA_2_7B, "model_type": "mistral", "sliding_window": 4096})
    )
    assert (
        json.loads(run("size", tmp_path, "--json").stdout)["tokens_where_cache_equals_weights"]
        is None
    )
    done = run("size", tmp_path)
    assert "window 4,096" in done.stdout
    assert "any number of tokens" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codec", "int3"], "codec: got 'int3'"),
        (["--batch", "0"], "batch: got 0"),
        (["--chip", "H300"], "chip: got 'H300'"),
        (["--chip", "H200", "--tokens", 10**400], "int too large"),
    ],
)
def test_bad_options_give_one_line(config, arguments, message):
    done = run("size", config, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"kvjax: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "line 1"), ("{}", "model_type: got None"), ('{"model_type": "t6"}', "got 't6'")],
)
def test_bad_configs_give_one_line(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    done = run("size", tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_version_and_help(config):
    assert run("--version").stdout == f"kvjax {kvjax.__version__}\n"
    assert "size" in run("--help").stdout
    assert "kvjax size config.json --tokens" in run("size", "--help").stdout


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["size", "--help"], ["size", "{config}"], ["plan", "{config}", "--batch", "4"]],
)
def test_no_jax_and_no_numpy(config, arguments):
    """The command runs where importing jax or numpy fails."""
    forbid = "sys.modules.update(jax=None, jaxlib=None, numpy=None, flax=None)"
    given = [str(config) if argument == "{config}" else argument for argument in arguments]
    done = run(*given, before=forbid)
    assert done.returncode == 0, done.stderr


def processor_seconds(*arguments: object, program: str | None = None) -> float:
    """Of the command, or of another program."""
    before = os.times()
    if program is None:
        assert run(*arguments).returncode == 0
    else:
        subprocess.run([sys.executable, "-c", program], check=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def test_it_starts_as_fast_as_what_it_prints_with(config):
    """In one run, with what starting Python, typer and rich takes: where that is 0.1 s, 0.4 s."""
    ratios = [
        processor_seconds("size", config) / processor_seconds(program="import typer, rich.table")
        for _ in range(3)
    ]
    assert min(ratios) < 4
