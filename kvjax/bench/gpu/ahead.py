"""Compiling many programs at once, before the first of them is run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


def compile_all[Key](
    builds: Mapping[Key, Callable[[], Any]],
    jobs: int,
    on_program: Callable[[Key, float], Any],
    deadline: float = math.inf,
) -> dict[Key, Future[Any]]:
    """The results of all `builds`, `jobs` of them in work at a time; they are there on return.

    Args:
      builds: by name. What one raises is raised where its result is asked for.
      jobs: threads; compilers leave Python to each other for most of their time.
      on_program: called with the name of each that has ended, and its seconds.
      deadline: seconds of the epoch; what would begin later raises TimeoutError instead.
    """

    def run(key: Key, build: Callable[[], Any]) -> Any:
        if time.time() > deadline:
            raise TimeoutError("time was up before it was compiled")
        start = time.perf_counter()
        try:
            return build()
        finally:
            on_program(key, time.perf_counter() - start)

    with ThreadPoolExecutor(jobs) as pool:
        return {key: pool.submit(run, key, build) for key, build in builds.items()}
