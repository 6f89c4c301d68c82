"""``kvjax calibrate`` as a user runs it, and ``kvjax generate`` with what it leaves."""

import inspect
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import kvjax
from kvjax import cli, sizing
from kvjax.cache import LayerScales, Scales
from kvjax.engine.calibrate_text import calibrate_model
from kvjax.models.cache_scales import load_scales, save_scales

GOLDEN = Path(__file__).parents[1] / "golden" / "llama_gqa_tied"
DEMO = Path(kvjax.__file__).parent / "data" / "demo_model"
SMALL = ["--length", "16", "--batch", "2", "--report-tokens", "20"]


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path_factory.mktemp("golden") / "model"))


def test_json_and_the_file(directory):
    ids = directory / "ids.npy"
    np.save(ids, np.random.default_rng(0).integers(0, 96, 80))
    options = ("--tokens", 48, *SMALL, "--percentile", 99.5, "--json")
    done = run("calibrate", directory, "--text", ids, *options)
    assert done.exit_code == 0, done.output
    figures, scales = json.loads(done.stdout), load_scales(directory)
    assert figures["path"] == str(directory / "kv_cache_scales.json")
    assert figures["codec"] == scales.codec == "fp8_e4m3_head"
    assert figures["source"] == scales.source == "ids.npy"
    assert figures["tokens"] == scales.tokens == 48
    assert figures["percentile"] == scales.percentile == 99.5
    assert figures["calibrated"]["tokens"] == figures["at_scale_1"]["tokens"] == 20
    assert len(figures["calibrated"]["layers"]) == len(scales.layers) == 2
    assert figures["calibrated"]["layers"][0]["output_8bit_query"] > 0
    assert figures["at_scale_1"]["layers"][0]["output_8bit_query"] is None
    assert figures["calibrated"]["kl"] != figures["at_scale_1"]["kl"]
    assert "calibrating" in done.stderr


def test_table_of_random_tokens(directory):
    done = run("calibrate", directory, "--random-tokens", 48, *SMALL)
    assert done.exit_code == 0, done.output
    for words in ("Relative error by layer", "48 tokens of random tokens, largest", "at scale 1"):
        assert words in " ".join(done.stdout.split())
    assert load_scales(directory).source == "random tokens"


def test_generate_takes_what_is_beside_the_model_and_says_so(tmp_path):
    """Scales so large that all keys and values become 0 give another text than scales of 1."""
    directory = shutil.copytree(DEMO, tmp_path / "model")
    options = ("--max-new-tokens", 4, "--codec", "fp8_e4m3_head", "--json")

    def generated(said):
        done = run("generate", directory, "And it came", *options)
        assert done.exit_code == 0, done.output
        assert f"scales of the cache: {said}\n" in done.stderr
        return json.loads(done.stdout)

    plain = generated("all 1, as none were calibrated")
    kv_heads = [layer.kv_heads for layer in sizing.load(directory).layers]
    huge = [LayerScales(*np.full((2, heads), 1e30, np.float32)) for heads in kv_heads]
    save_scales(Scales("fp8_e4m3_head", tuple(huge), "text.txt", 1), directory)
    found = generated("calibrated on text.txt")
    assert found["continuations"] != plain["continuations"]
    assert found["cache_bytes"] == plain["cache_bytes"]
    one = LayerScales(np.ones((), np.float32), np.ones((), np.float32))
    save_scales(Scales("fp8_e4m3", (one,) * len(huge), "text.txt", 1), directory)
    assert generated("all 1, as those beside the model are for fp8_e4m3") == plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "kvjax: got neither; accepted: --text FILE or --random-tokens N"),
        (["--text", "a.txt", "--random-tokens", "5"], "kvjax: got both; accepted: --text FILE or"),
        (["--random-tokens", "0"], "kvjax: tokens: got 0; accepted: 1 and more"),
        (["--random-tokens", "5", "--codec", "int8"], "kvjax: codec: got 'int8', which has no"),
    ],
)
def test_one_clear_error(directory, arguments, message):
    done = run("calibrate", directory, *arguments)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith(message)


def test_defaults_are_those_of_the_library():
    command = inspect.signature(cli.calibrate).parameters
    library = inspect.signature(calibrate_model).parameters
    shared = library.keys() & command.keys() - {"text"}
    assert shared == library.keys() - {"model_dir", "text", "on_progress"}
    assert all(command[name].default == library[name].default for name in shared)
