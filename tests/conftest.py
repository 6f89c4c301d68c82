"""Settings of the whole test run: JAX on the CPU, and the same random cases every time."""

import os

from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before any test module imports jax

# HYPOTHESIS_PROFILE=search tries new and more cases, to find what a fixed set does not.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=3000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
