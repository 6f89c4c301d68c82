"""Text to text with every layout and codec that the command's help lists."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from quick import rest_slow
from typer.testing import CliRunner

import kvjax
from kvjax import engine
from kvjax.cache import Paged, SinkRing
from kvjax.cache.kivi_codec import KIVI
from kvjax.cache.spelling import CODECS, SPELLINGS, read_layout
from kvjax.cli import app
from kvjax.evict import POLICIES, Protected

MODEL = Path(kvjax.__file__).parent / "data" / "demo_model"
PROMPT = "And it came to pass in the days of the king that"


def text_of(**settings) -> engine.Continuations:
    return engine.generate_text(MODEL, [PROMPT, "And the"], 24, dtype="f32", **settings)


@pytest.fixture(scope="module")
def plain() -> engine.Continuations:
    return text_of(codec="f32")


# Of sinks a ring that is long enough to keep all.
@pytest.mark.parametrize(
    "layout",
    rest_slow(["dense", Paged(4), SinkRing(4, 64)], [Paged(4), SinkRing(4, 64)]),
    ids=str,
)
def test_what_keeps_everything_says_the_same(layout, plain):
    assert text_of(layout=layout, codec="f32").texts == plain.texts


# As the help lists them, with numbers for letters.
LAYOUTS = [
    spelling.replace("P", "32").replace("N", "2").replace("W", "16") for spelling in SPELLINGS
]


# By default each layout, with codecs of each kind.
LISTED = rest_slow(
    product(LAYOUTS, CODECS),
    [
        *(("auto", "fp8_e4m3_token"), ("dense", "kivi2"), ("ring", "bf16"), ("paged", "kivi4")),
        *(("paged:32", "int8"), ("sinks:2+16", "int4"), ("sinks:2+16:reindexed", "bf16")),
    ],
)


def refusal(layout, codec) -> str | None:
    """Why this model, whose layers have no windows, is refused such a cache."""
    if layout == "ring":
        return "the layer has no window"
    if codec in KIVI and (layout == "paged" or layout.startswith("sinks")):
        return "share a scale over 32 tokens"
    return None


@pytest.mark.parametrize(("layout", "codec"), LISTED)
def test_what_the_help_lists_speaks_or_says_why_not(layout, codec):
    settings = {"layout": read_layout(layout), "codec": codec}
    if reason := refusal(layout, codec):
        with pytest.raises(ValueError, match=reason):
            text_of(**settings)
        return
    for text in text_of(**settings).texts:
        assert len(text.split()) > 8
        assert text.isascii()


def test_an_eviction_speaks_and_takes_less():
    policy = replace(POLICIES["snapkv"], observe=4, protected=Protected(recent=4))
    found = text_of(eviction=engine.Eviction(policy, 8, every=8), codec="bf16")
    assert all(len(text.split()) > 8 for text in found.texts)
    assert found.cache_bytes < found.dense_bytes
    assert found.cache_bytes <= found.peak_bytes < found.dense_bytes


def test_what_cannot_be_is_refused_before_weights_are_read(monkeypatch):
    monkeypatch.delattr("kvjax.engine.text.load")
    with pytest.raises(ValueError, match="keep: keys of codec kivi2"):
        text_of(codec="kivi2", eviction=engine.Eviction(POLICIES["knorm"], 8))
    with pytest.raises(ValueError, match="budget: got 8; accepted: at least 1, and the 64"):
        text_of(eviction=engine.Eviction(POLICIES["snapkv"], 8))
    with pytest.raises(ValueError, match="codec='nvfp4'"):
        text_of(codec="nvfp4")


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
         "--layout", "paged:8", "--codec", "int8", "--evict", "knorm:8/2", "--json"],
        capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    figures = json.loads(done.stdout)
    assert 0 < figures["cache_bytes"] <= figures["peak_cache_bytes"] < figures["dense_bf16_bytes"]
    assert figures["saved_bytes"] == figures["dense_bf16_bytes"] - figures["cache_bytes"]


@pytest.mark.parametrize(
    ("cache", "peak", "line"),
    [
        (250, 250, "cache: 250 B, 1,750 B (87.5%) less than a dense bf16 one of 2,000 B"),
        (250, 900, "less than a dense bf16 one of 2,000 B; at most 900 B"),
        (2000, 2000, "cache: 2,000 B, as much as a dense bf16 one of 2,000 B"),
        (3000, 3000, "3,000 B, 1,000 B (50.0%) more than a dense bf16 one of 2,000 B, which is"),
    ],
)
def test_what_a_cache_saved_in_words(cache, peak, line, monkeypatch):
    found = engine.Continuations([" end"], cache, peak, 2000, None)
    monkeypatch.setattr(engine, "generate_text", lambda *args, **settings: found)
    done = CliRunner().invoke(app, ["generate", "model", "The"])
    assert done.stdout == "The end\n"
    assert line in done.stderr


def test_the_help_lists_what_there_is():
    listed = CliRunner().invoke(app, ["generate", "--help"], terminal_width=500).output
    for choice in (*SPELLINGS, *CODECS, *POLICIES):
        assert choice in listed


@pytest.mark.parametrize(
    ("option", "given"), [("--layout", "tree"), ("--codec", "int3"), ("--evict", "lru:8")]
)
def test_other_choices_are_one_clear_error(option, given):
    done = CliRunner().invoke(app, ["generate", str(MODEL), "The", option, given])
    assert done.exit_code == 1
    [line] = done.stderr.splitlines()
    assert f"got '{given}'; accepted: " in line
