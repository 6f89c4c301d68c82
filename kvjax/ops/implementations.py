"""Which implementation serves a call: the one asked for, or the best that can."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType


def choose[T](
    requested: str | None,
    implementations: Mapping[str, T],
    obstacles: Mapping[str, str | None] = MappingProxyType({}),
    on_gpu: bool = False,
) -> T:
    """The implementation of that name, or the first that can serve if None is requested.

    Args:
      requested: a name, or None.
      implementations: by name, best first.
      obstacles: why an implementation cannot serve this call; None or no entry where it can.
      on_gpu: whether it is to run on a GPU. There a lesser one than the best is not taken without a
        warning, given once, of what stood in the way.

    Raises:
      ValueError: if the requested one does not exist, or cannot serve and why.
    """
    able = [name for name in implementations if obstacles.get(name) is None]
    name = able[0] if requested is None else requested
    if name not in able:
        reason = obstacles.get(name, "there is none of that name for this op")
        raise ValueError(
            f"implementation={name!r}: {reason}; accepted here are None, "
            f"{', '.join(map(repr, able))}"
        )
    best = next(iter(implementations))
    if requested is None and on_gpu and name != best:
        warn_once(f"attention on this GPU runs as {name!r} and not as {best!r}: {obstacles[best]}")
    return implementations[name]


@cache
def warn_once(message: str) -> None:
    """Warn, the first time that this is said."""
    warnings.warn(message, stacklevel=4)
