"""The checks that the public functions of sizing need."""

import operator
from numbers import Real
from typing import SupportsIndex


def whole(name: str, value: object, least: int = 1) -> int:
    """Return `value` as an int if it is a whole number of at least `least`.

    Floats are refused even where they are integral (a float head_dim is a division gone wrong),
    and so are booleans.

    Raises:
        ValueError: names the argument or config field, what was given and what is accepted.
    """
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:  # an array of several numbers
            pass
        else:
            if number >= least:
                return number
    raise ValueError(f"{name}: got {value!r}; accepted: a whole number, at least {least}")


def is_amount(value: object) -> bool:
    """Whether it is a number of at least 0; infinity is one, NaN and booleans are not."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and value >= 0  # type: ignore[operator]


def amount[Number](name: str, value: Number) -> Number:
    """Return `value` if it is a number of at least 0, infinity included.

    Raises:
        ValueError: names the argument, what was given and what is accepted.
    """
    if not is_amount(value):
        raise ValueError(f"{name}: got {value!r}; accepted: 0 or more")
    return value
