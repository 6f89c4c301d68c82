"""Settings of the whole test run: JAX on the CPU, and the same random cases every time."""

import os
import sys

import pytest
from hypothesis import settings

# Before any test module imports jax. Programs here run for milliseconds: most of the time would go
# into optimising them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# Before anything imports them.
pytest.register_assert_rewrite("laws.checks", "laws.compiled")

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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of a file run in one process, and so do those of a member of the laws.

    Both share programs, whose compilation takes most of the time.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            # A member comes first of what a test is tried with.
            case = test.partition("[")[2].removesuffix("]")
            return case.partition("-")[0] if "/laws/" in file and case else file

    return Together(config, log)
