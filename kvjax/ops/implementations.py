"""Which implementation serves a call: the one asked for, or the best that can."""

from __future__ import annotations

from collections.abc import Mapping


def choose[T](
    requested: str | None,
    implementations: Mapping[str, T],
    obstacles: Mapping[str, str | None] | None = None,
) -> T:
    """The implementation of that name, or the first that can serve if None is requested.

    Args:
      requested: a name, or None.
      implementations: by name, best first.
      obstacles: why an implementation cannot serve this call; None or no entry where it can.

    Raises:
      ValueError: if the requested one does not exist, or cannot serve and why.
    """
    obstacles = obstacles or {}
    able = [name for name in implementations if obstacles.get(name) is None]
    name = able[0] if requested is None else requested
    if name not in able:
        reason = obstacles.get(name, "there is none of that name for this op")
        raise ValueError(
            f"implementation={name!r}: {reason}; accepted here are None, "
            f"{', '.join(map(repr, able))}"
        )
    return implementations[name]
