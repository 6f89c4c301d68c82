"""The one check that every public function of sizing needs."""

import operator
from typing import SupportsIndex


def whole(name: str, value: object, least: int = 1) -> int:
    """Return `value` as an int if it is a whole number of at least `least`.

    Floats are refused even where they are integral (a float head_dim is a division gone wrong),
    and so are booleans.

    Raises:
        ValueError: names the argument or config field, what was given and what is accepted.
    """
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        number = operator.index(value)
        if number >= least:
            return number
    raise ValueError(f"{name}: got {value!r}; accepted: a whole number, at least {least}")
