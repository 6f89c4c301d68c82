"""Settings of the whole test run: JAX on the CPU unless the environment says otherwise."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before any test module imports jax
