"""Evictions as a command line spells them."""

import re

import pytest

from kvjax.engine import Eviction
from kvjax.engine.spelling import read_eviction
from kvjax.evict import POLICIES


@pytest.mark.parametrize("name", POLICIES)
def test_spellings(name):
    assert read_eviction(f"{name}:256") == Eviction(POLICIES[name], 256)
    assert read_eviction(f"{name}:256/64") == Eviction(POLICIES[name], 256, 64)


@pytest.mark.parametrize(
    "text", ["", "snapkv", "snapkv:", "lru:8", "snapkv:x", "snapkv:0", "snapkv:8/", "snapkv:8/0"]
)
def test_others_are_refused(text):
    message = f"eviction: got '{text}'; accepted: POLICY:BUDGET or POLICY:BUDGET/EVERY, numbers"
    with pytest.raises(ValueError, match=re.escape(message)):
        read_eviction(text)
