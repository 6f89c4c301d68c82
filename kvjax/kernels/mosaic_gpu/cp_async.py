"""Copies to shared memory on GPUs without tensor copies, and what simulates them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu


class Copies(Protocol):
    """Copies that end in the order in which they began."""

    def begin(self, source: Any, target: Any) -> None:
        """Begin a copy when every warp has read what it replaces."""
        ...

    def wait(self, ahead: int) -> None:
        """Wait until all copies have ended but the last `ahead`, for every warp."""
        ...


@dataclass(frozen=True)
class CpAsync:
    """`cp.async`. The compiler adds barriers, before each copy and after each wait."""

    def begin(self, source: Any, target: Any) -> None:
        plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    def wait(self, ahead: int) -> None:
        plgpu.wait_gmem_to_smem(ahead)


@dataclass(frozen=True)
class Counted:
    """Tensor copies, which can be interpreted, waited for by their count like `CpAsync`.

    The interpreter's race detector sees what reads too early, and what is replaced too early.

    Attributes:
      ends: barriers, one for each copy that may be under way.
      counts: (2,) int32, copies that began, and that were waited for.
    """

    ends: Any
    counts: Any

    @staticmethod
    def scratch(most: int) -> tuple[Any, Any]:
        """Shared memory for so many copies under way."""
        return plgpu.Barrier(num_barriers=most), plgpu.SMEM((2,), jnp.int32)

    @classmethod
    def start(cls, ends: Any, counts: Any) -> Counted:
        counts[0] = 0
        counts[1] = 0
        return cls(ends, counts)

    def begin(self, source: Any, target: Any) -> None:
        plgpu.commit_smem()
        began = self.counts[0]
        plgpu.copy_gmem_to_smem(source, target, self._end(began))
        self.counts[0] = began + 1

    def wait(self, ahead: int) -> None:
        ended = self.counts[1]
        until = jnp.maximum(self.counts[0] - ahead, ended)
        lax.fori_loop(ended, until, lambda i, _: plgpu.barrier_wait(self._end(i)), None)
        self.counts[1] = until

    def _end(self, number: Array) -> Any:
        return self.ends.at[lax.rem(number, jnp.int32(self.ends.shape[0]))]
