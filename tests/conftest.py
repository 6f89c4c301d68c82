"""Settings of the whole test run: JAX on the CPU, and the same random cases every time."""

import os
import sys

import pytest
from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before any test module imports jax

# HYPOTHESIS_PROFILE=search tries new and more cases, to find what a fixed set does not.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=3000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True, scope="module")
def free_compiled_programs():
    """Each compiled program holds memory maps, of which a process may have only so many."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
