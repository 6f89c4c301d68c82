"""How fast this machine moves memory: the yardstick of every floor, measured in the same rounds.

Three probes over large float32 arrays, each one jitted program with its output in donated memory
(a fresh output costs page faults on a CPU, which would make memory look several times slower):

- copy: one array into another. Counted are the bytes read and the bytes written. A CPU without
  non-temporal stores reads the destination first, which is not counted.
- update: an array negated in place; bytes read and bytes written.
- read: an array summed; bytes read.

Decode reads its cache and writes next to nothing, so reading is what it could reach at best; but a
reduction may itself fall short of the memory. The yardstick is therefore the fastest of the three:
a floor must not be higher than what the memory has been seen to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.bench.timing import Timing, time_calls

ARRAY_BYTES = 2**28


@dataclass(frozen=True)
class Probe:
    """One way of moving memory: a step that moves `nbytes` bytes, as a sampler."""

    nbytes: int
    step: Callable[[], Array]

    def __call__(self, calls: int) -> float:
        return time_calls(self.step, calls)


@dataclass(frozen=True)
class Bandwidth:
    """Medians of the probes, in bytes/s."""

    bytes_per_second: Mapping[str, float]

    @classmethod
    def of(cls, probes: Mapping[str, Probe], timings: Mapping[str, Timing]) -> Bandwidth:
        return cls({name: probe.nbytes / timings[name].median for name, probe in probes.items()})

    @property
    def yardstick(self) -> str:
        """The fastest probe."""
        return max(self.bytes_per_second, key=lambda name: self.bytes_per_second[name])

    @property
    def best(self) -> float:
        """Bytes/s of the yardstick."""
        return self.bytes_per_second[self.yardstick]

    def figures(self) -> dict[str, Any]:
        return {"bytes_per_second": dict(self.bytes_per_second), "yardstick": self.yardstick}


def probes(array_bytes: int = ARRAY_BYTES) -> dict[str, Probe]:
    """The probes over arrays of that many bytes; three such arrays stay allocated."""
    source, target, updated = (jnp.ones(array_bytes // 4, jnp.float32) for _ in range(3))
    held = {"target": target, "updated": updated}

    def copy() -> Array:
        held["target"] = _copy(source, held["target"])
        return held["target"]

    def update() -> Array:
        held["updated"] = _negate(held["updated"])
        return held["updated"]

    return {
        "copy": Probe(2 * source.nbytes, copy),
        "update": Probe(2 * source.nbytes, update),
        "read": Probe(source.nbytes, lambda: _sum(source)),
    }


@partial(jax.jit, donate_argnames="target")
def _copy(source: Array, target: Array) -> Array:
    return target.at[:].set(source)


@partial(jax.jit, donate_argnames="x")
def _negate(x: Array) -> Array:
    return -x


@jax.jit
def _sum(x: Array) -> Array:
    return x.sum()
