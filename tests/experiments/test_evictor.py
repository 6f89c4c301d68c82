"""What the experiments on eviction share, and how they ask."""

import importlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvjax import models
from kvjax.engine import compress, prefill
from kvjax.evict import POLICIES, Protected, Pyramid

ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "kvjax" / "data" / "demo_model"
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 40), np.int32)
BUDGET = 16
WINDOW = {"observe": 4, "protected": Protected(recent=4)}
SMALL = {
    "tova": POLICIES["tova"],
    "pyramidkv": replace(POLICIES["pyramidkv"], **WINDOW, budgets=Pyramid(beta=4)),
    "adakv": replace(POLICIES["adakv"], **WINDOW),
}


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    return importlib.import_module


@cache
def filled():
    model = models.load(ROOT / "tests" / "golden" / "llama_gqa_tied", dtype="f32")
    count = np.full(2, TOKENS.shape[1], np.int32)
    return model, prefill(model, TOKENS, model.init_cache(2, 48, codec="bf16"), count)[1]


def positions(layer):
    return [[set(head[head >= 0].tolist()) for head in row] for row in np.asarray(layer.pos)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_same_caches_as_compress(load, name):
    module, (model, full) = load("evictor"), filled()
    evictor = module.Evictor(model, full, module.observed(model, full, TOKENS))
    indices = evictor.indices(SMALL[name], BUDGET)
    want = compress(model, full, TOKENS, SMALL[name], BUDGET)
    assert evictor.nbytes(indices) == want.nbytes
    for layer, same in zip(evictor.kept(indices, 48).layers, want.layers, strict=True):
        assert positions(layer) == positions(same)
        assert layer.capacity == 48


def test_as_many_slots_as_the_bytes_allow(load):
    """Heads that keep different numbers are given fewer; a codec of fewer bytes more."""
    module, (model, full) = load("evictor"), filled()
    evictor = module.Evictor(model, full, module.observed(model, full, TOKENS))
    target = evictor.even_bytes(32)
    assert module.fitting(evictor, POLICIES["h2o"], 32, target)[0] == 32
    slots, indices = module.fitting(evictor, SMALL["adakv"], 32, target)
    assert evictor.nbytes(indices) <= 1.02 * target
    more = evictor.indices(SMALL["adakv"], slots + module.STEP)
    assert slots == 32 or evictor.nbytes(more) > 1.02 * target
    with pytest.raises(ValueError, match="budget: got 3; accepted: at least the 4 protected"):
        evictor.indices(SMALL["adakv"], 3)


def test_a_key_is_hidden_and_asked_for(load, monkeypatch):
    needle = load("needle")
    setup = SimpleNamespace(model=None, directory=DEMO_MODEL)
    texts = needle.Texts(setup, needle.INTRO, 300, 3)
    decode = texts._tokenizer.decode
    for row, key, place in zip(texts._rows, texts._keys, (0, 0.5, 1), strict=True):
        assert len(row) == 300
        said = decode(row.tolist())
        key = decode(key).strip()
        filler = said.index("The grass"), len(said)
        at = said.index(f"The pass key is {key}. Remember it.")
        assert said.count(key) == 2
        assert abs((at - filler[0]) / (filler[1] - filler[0]) - place) < 0.3
        assert said.endswith(("again.", "pass key."))

    def scored(model, tokens, cache, *, count, chunk):
        """All right, but the last token of the second key, and what is asked before any."""
        said = tokens[:, 1:].copy()
        said[1, count[1] - 2] += 1
        said[:, : count[0] - len(texts._keys[0]) - 1] += 1
        return SimpleNamespace(likeliest=said, nll=np.ones(said.shape)), cache

    monkeypatch.setattr(needle, "score", scored)
    for asked in (False, True):
        answers = texts.answers(None, needle.QUESTION, asked)
        assert answers == {"found": 2, "by_depth": [True, False, True], "loss": 1.0}
