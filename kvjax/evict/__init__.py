"""Eviction: which cached tokens to keep when memory is to be freed."""

from kvjax.evict.budgets import Budgets, Pyramid, Uniform
from kvjax.evict.observe import Queries, Seen, observe
from kvjax.evict.policy import (
    ADAKV,
    EXPECTED_ATTENTION,
    H2O,
    KEYDIFF,
    KNORM,
    POLICIES,
    PYRAMIDKV,
    SNAPKV,
    STREAMING_LLM,
    TOVA,
    Policy,
)
from kvjax.evict.select import Adaptive, Evenly, Heads, Protected, choose

__all__ = [
    "ADAKV",
    "EXPECTED_ATTENTION",
    "H2O",
    "KEYDIFF",
    "KNORM",
    "POLICIES",
    "PYRAMIDKV",
    "SNAPKV",
    "STREAMING_LLM",
    "TOVA",
    "Adaptive",
    "Budgets",
    "Evenly",
    "Heads",
    "Policy",
    "Protected",
    "Pyramid",
    "Queries",
    "Seen",
    "Uniform",
    "choose",
    "observe",
]
