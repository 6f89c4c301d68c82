"""Fixtures of the laws: members, of which those of a pairwise cover are tried by default."""

from pathlib import Path

import jax
import pytest

from laws.members import CACHES, CacheCase, Member, pairwise, product

EVERY = product()
QUICK = frozenset(pairwise(EVERY))
# On these each check is shown to be able to fail.
SHOWN = frozenset(list(pairwise(EVERY))[:6])

# Of the 65530 memory maps that Linux lets a process have.
MANY_MAPS = 20_000


@pytest.fixture(autouse=True, scope="module")
def free_compiled_programs():
    """In place of the one for all modules: here programs serve several, and a member's go with it.

    What is left are those of single operations.
    """
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_text().count("\n") > MANY_MAPS:
        jax.clear_caches()


# Of the whole session, so that all tests of a member follow each other.
@pytest.fixture(
    scope="session",
    params=[
        pytest.param(axes, id=", ".join(axes), marks=() if axes in QUICK else pytest.mark.slow)
        for axes in EVERY
    ],
)
def member(request) -> Member:
    tried = request.param.member()
    yield tried
    tried.programs.clear()
    tried.filled.clear()


@pytest.fixture(
    params=[
        pytest.param(
            case,
            id=name,
            marks=() if name.endswith(" f32") or "dense" in name else pytest.mark.slow,
        )
        for name, case in CACHES.items()
        # A ring needs a window, and groups a capacity that they fill (see the tests of each).
        if isinstance(case.codec, str) and not name.startswith("ring")
    ]
)
def cache_case(request) -> CacheCase:
    return request.param


def pytest_collection_modifyitems(config, items):
    """Tests that show that a check can fail are for a few members."""

    def idle(item) -> bool:
        shown = item.get_closest_marker("control") is not None
        return shown and item.callspec.params["member"] not in SHOWN

    dropped = [item for item in items if idle(item)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if not idle(item)]
