"""Law 2: what sizing says is what the arrays of a live cache take."""

from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax import models, sizing
from kvjax.engine import decode

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("llama_mha", "gemma_mqa", "qwen3_mha", "olmo2_gqa", "gpt2_conv1d", "gpt_neox_sequential")


@cache
def model(name):
    return models.load(GOLDEN / name)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_cache(name, cache_case):
    spec = sizing.load(GOLDEN / name)
    for batch, capacity in ((1, 1), (1, 32), (3, 7)):
        cache = model(name).init_cache(batch, capacity, cache_case.layout, cache_case.codec)
        said = spec.cache_bytes(capacity, batch, cache_case.codec)
        live = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
        assert live == said.allocated + said.state + said.tables
        assert live == cache.nbytes
        assert said.allocated >= batch * capacity


def test_a_step_changes_none(cache_case):
    cache = model("llama_mha").init_cache(2, 8, cache_case.layout, cache_case.codec)
    before = cache.nbytes
    _, cache = decode(model("llama_mha"), np.ones((2, 1), np.int32), cache, np.ones(2, np.int32))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == before
