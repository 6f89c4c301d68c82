"""Of a product of cases some are tried by default, and all with those marked slow."""

from collections.abc import Collection, Iterable

import pytest


def rest_slow(cases: Iterable, quick: Collection) -> list:
    """A parameter, or several in a tuple, of each case; those not in `quick` are slow."""
    cases = list(cases)
    if unknown := [case for case in quick if case not in cases]:
        raise ValueError(f"quick: got {unknown}; accepted: {cases}")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in cases
    ]
