"""Timing of calls that are shorter than their dispatch, or whose operands would stay in a cache.

A call of a jitted function costs the host tens of microseconds, a decode step over a short cache
less than ten on the device: timed call by call, the host is what is measured. And a step that is
repeated over the same few MB reads them from the device's L2 cache, which a step among the others
of a model never does. So a program is a chain:

    first = step(x, operands[0])
    last = fori_loop(0, laps, lambda _, x: step(... step(x, operands[1]) ..., operands[0]), first)

Each call gets the output of the one before as its x, so that none can be left out, moved or run
beside another, and nothing but the step itself stands between two calls: an output of decode
attention has the shape and dtype of its queries. `operands` are as many copies as together exceed
the L2 cache several times; they are arguments of the program, unrolled within a lap, because
indexing one array of all would copy a slice of it before each call. Laps make the program long
beside its one dispatch. Their number is a constant of the program, so that a GPU's host need not
read a condition back after each. Steps over large operands stand alone, one copy and no lap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from kvjax.bench.timing import Timing

# L2 of an H100 or H200 is 50 MB, of a B200 126 MB.
L2_BYTES = 50 * 10**6
# Copies exceed it this many times, as far as `MOST_COPIES` allows.
TIMES_L2 = 8
# More would be long to compile.
MOST_COPIES = 32
# A program's floor: some 20 dispatches.
PROGRAM_SECONDS = 1e-3


@dataclass(frozen=True)
class Chain:
    """How many calls a program makes.

    Attributes:
      copies: of the operands.
      laps: passes over all copies, after the first call.
    """

    copies: int = 1
    laps: int = 0

    @property
    def calls(self) -> int:
        return 1 + self.laps * self.copies

    def program(self, step: Callable[[Array, Any], Array]) -> Callable[..., tuple[Array, Array]]:
        """(x, operands) -> (what the first call gave, what the last gave); to be jitted.

        Args:
          step: x and one of the operands to an array like x.
        """
        step = jax.jit(step)  # traced and lowered once for all calls

        def run(x: Array, operands: Sequence[Any]) -> tuple[Array, Array]:
            def lap(_: Any, x: Array) -> Array:
                for one in (*operands[1:], operands[0]):
                    x = step(x, one)
                return x

            first = step(x, operands[0])
            return first, jax.lax.fori_loop(0, self.laps, lap, first) if self.laps else first

        return run

    def per_call(self, timing: Timing) -> Timing:
        """The timing of a program as that of its calls."""
        samples = tuple(seconds / self.calls for seconds in timing.samples)
        return Timing(timing.calls * self.calls, samples)


def plan(nbytes: int, bytes_per_second: float, copies: int | None = None) -> Chain:
    """The chain of a step that reads `nbytes` bytes, on a device of that bandwidth.

    Args:
      nbytes, bytes_per_second: what a call takes at least.
      copies: of the operands; None for as many as exceed the L2 cache several times.
    """
    if copies is None:
        copies = max(1, min(MOST_COPIES, math.ceil(TIMES_L2 * L2_BYTES / nbytes)))
    if copies == 1:
        return Chain()
    return Chain(copies, math.ceil(PROGRAM_SECONDS * bytes_per_second / (copies * nbytes)))
