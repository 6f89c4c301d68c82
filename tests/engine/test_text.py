"""Text to text with every layout and codec that the command's help lists."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvjax
from kvjax import engine
from kvjax.cache import Paged, SinkRing

MODEL = Path(kvjax.__file__).parent / "data" / "demo_model"
PROMPT = "And it came to pass in the days of the king that"


def text_of(**settings) -> engine.Continuations:
    return engine.generate_text(MODEL, [PROMPT, "And the"], 24, dtype="f32", **settings)


@pytest.fixture(scope="module")
def plain() -> engine.Continuations:
    return text_of(codec="f32")


@pytest.mark.parametrize(
    "settings",
    [
        {"layout": "dense", "codec": "f32"},
        {"layout": Paged(4), "codec": "f32"},
        {"layout": SinkRing(4, 64), "codec": "f32"},  # long enough to keep all
    ],
    ids=str,
)
def test_what_keeps_everything_says_the_same(settings, plain):
    assert text_of(**settings).texts == plain.texts


@pytest.mark.parametrize(
    "codec", ["bf16", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3_token", "int8", "int4"]
)
@pytest.mark.parametrize("layout", ["auto", Paged(16), SinkRing(2, 16)], ids=str)
def test_what_forgets_or_rounds_still_speaks(layout, codec):
    for text in text_of(layout=layout, codec=codec).texts:
        assert len(text.split()) > 8
        assert text.isascii()


def test_the_bytes_are_those_of_the_caches(plain):
    """f32 takes twice what bf16 does, less the tables; int8 little over half."""
    records = plain.dense_bytes
    assert records < plain.cache_bytes < 2 * records
    assert records / 2 < text_of(codec="int8").cache_bytes < 0.6 * records
    ring = text_of(layout=SinkRing(1, 7), codec="bf16")
    assert ring.cache_bytes < records / 3
    assert ring.dense_bytes == records


def test_the_command_prints_them():
    done = subprocess.run(
        [sys.executable, "-m", "kvjax", "generate", str(MODEL), PROMPT, "--max-new-tokens", "4",
         "--layout", "paged:8", "--codec", "int8", "--json"],
        capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    figures = json.loads(done.stdout)
    assert 0 < figures["cache_bytes"] < figures["dense_bf16_bytes"]
