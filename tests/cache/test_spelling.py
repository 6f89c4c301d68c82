"""Layouts as a command line spells them."""

import re

import pytest

from kvjax.cache import Paged, SinkRing
from kvjax.cache.spelling import read_layout


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("auto", "auto"),
        ("dense", "dense"),
        ("ring", "ring"),
        ("paged", Paged(16)),
        ("paged:32", Paged(32)),
        ("sinks:4+1020", SinkRing(4, 1020)),
        ("sinks:0+8", SinkRing(0, 8)),
        ("sinks:4+252:reindexed", SinkRing(4, 252, reindexed=True)),
    ],
)
def test_spellings(text, layout):
    assert read_layout(text) == layout


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tree",
        "paged:0",
        "paged:x",
        "paged:1+2",
        "sinks",
        "sinks:4",
        "sinks:4+0",
        "ring:4",
        "sinks:4+8:",
        "sinks:4+8:absolute",
        "sinks:4+8:reindexed:",
        "sinks:reindexed",
        "paged:8:reindexed",
        "dense:",
    ],
)
def test_others_are_refused(text):
    with pytest.raises(
        ValueError, match=re.escape(f"layout: got '{text}'; accepted: auto, dense, ring, pag")
    ):
        read_layout(text)
