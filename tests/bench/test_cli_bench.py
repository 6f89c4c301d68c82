import json

import pytest
from typer.testing import CliRunner

from kvjax.bench import case, decode_attention, presets
from kvjax.cli import app

SMALL = ["--batch", "1", "--query-heads", "2", "--head-dim", "8", "--rounds", "3"]


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.mark.usefixtures("quick")
def test_attention_with_files(tmp_path):
    done = bench(
        *SMALL, "--kv-heads", "2,1", "--length", "16", "--codec", "f32", "--peers", "jax.nn",
        "--out", tmp_path,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "decode_attention.json").read_text())
    shapes = [(row["contender"], row["kv_heads"], row["length"]) for row in figures["rows"]]
    assert shapes == [("kvjax", 2, 16), ("jax.nn", 2, 16), ("kvjax", 1, 16), ("jax.nn", 1, 16)]
    assert "jax.nn" in done.stdout
    assert "decode_attention_kv_heads.png" in done.stdout


@pytest.mark.usefixtures("quick")
def test_json_alone_on_standard_output():
    done = bench(
        *SMALL, "--kv-heads", "1", "--length", "8,16", "--capacity", "32", "--codec", "bf16",
        "--peers", "", "--json",
    )  # fmt: skip
    rows = json.loads(done.stdout)["rows"]
    assert [(row["contender"], row["length"], row["capacity"]) for row in rows] == [
        ("kvjax", 8, 32),
        ("kvjax", 16, 32),
    ]


@pytest.mark.usefixtures("quick")
def test_preset(monkeypatch):
    tiny = case.Case(1, 2, 1, 8, length=4, capacity=4, codec="f32")
    preset = presets.Preset(decode_attention.measure, {tiny: ("kvjax",)}, [], peers=True)
    monkeypatch.setitem(presets.PRESETS, "acceptance", preset)
    done = bench("--preset", "acceptance", "--rounds", 3, "--json")
    assert json.loads(done.stdout)["settings"]["preset"] == "acceptance"


@pytest.mark.usefixtures("quick")
def test_models(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vocab_size": 32,
            }
        )
    )
    sizes = ["--length", "4,8", "--capacity", 8, "--codec", "f32"]
    done = bench(config, *sizes, "--dtype", "bf16", "--rounds", 3, "--json")
    rows = json.loads(done.stdout)["rows"]
    assert [(row["model"], row["length"]) for row in rows] == [(str(config), 4), (str(config), 8)]
    assert rows[0]["weight_codec"] == "bf16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-heads", "8;1"], "--kv-heads '8;1': whole numbers with commas between"),
        (["--kv-heads", "5"], "kv_heads: got 5 for 32 query heads"),
        (["--length", "64", "--capacity", "32"], "length=64: at most the capacity, 32"),
        (["--codec", "int3"], "codec: got 'int3'"),
        (["--peers", "numpy"], "peer 'numpy': accepted are"),
        (["--preset", "speed"], "preset='speed': accepted are acceptance"),
        (["no/such/model"], "no/such/model"),
    ],
)
def test_one_clear_error(arguments, message):
    done = bench(*arguments)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Traceback" not in done.output
