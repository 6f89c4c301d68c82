"""The matrix units, as functions from two operands to their product.

The larger operand `a` (M, C), with M a multiple of 64, is a tile of keys or of transposed values;
the smaller `b` (C, N) are queries or weights, with N a multiple of 8: a group of few heads wastes
no more than what fills it up to 8. Products are summed up in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# How a warpgroup holds a result (M, N), whatever the unit, and how it is stored transposed.
RESULT = plgpu.Layout.WGMMA
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED


class Unit(Protocol):
    """A way to multiply."""

    @property
    def reads_generic(self) -> bool:
        """Whether the warps read operands, and not the unit: copies over them then need a fence."""
        ...

    @property
    def takes_registers(self) -> bool:
        """Whether `a` may be an array in registers, laid out as `RESULT`."""
        ...

    def __call__(self, a: Any, b: Any) -> Array:
        """a @ b, of references to shared memory."""
        ...


@dataclass(frozen=True)
class Wgmma:
    """`wgmma` of Hopper (sm_90a), which reads operands from shared memory itself."""

    reads_generic = False
    takes_registers = True

    def __call__(self, a: Any, b: Any) -> Array:
        def product(sums: Any) -> Array:
            plgpu.wgmma(sums, a, b)
            return sums[...]

        return pl.run_scoped(product, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


@dataclass(frozen=True)
class Mma:
    """`mma.sync`, which every GPU since Ampere has; operands pass through registers."""

    reads_generic = True
    takes_registers = False

    def __call__(self, a: Any, b: Any) -> Array:
        layout = plgpu.Layout
        left = plgpu.load(a, layout=layout.MMA_LHS(a.dtype))
        right = plgpu.load(b, layout=layout.MMA_RHS(a.dtype))
        zero = jnp.zeros((a.shape[0], b.shape[1]), jnp.float32)
        return plgpu.mma(plgpu.layout_cast(zero, layout.MMA_ACC(a.dtype)), left, right)


@dataclass(frozen=True)
class Reads:
    """Ordinary reads and XLA's product: what stands for `Mma` where kernels are interpreted.

    The interpreter's race detector sees these reads; it does not see those of `wgmma`.
    """

    reads_generic = True
    takes_registers = False

    def __call__(self, a: Any, b: Any) -> Array:
        left = a if isinstance(a, Array) else a[...]
        return jnp.dot(
            left,
            b[...],
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )


@dataclass(frozen=True)
class InterpretedWgmma:
    """`Wgmma` as far as it can be interpreted, which is for operands in shared memory."""

    reads_generic = False
    takes_registers = True

    def __call__(self, a: Any, b: Any) -> Array:
        return (Reads() if isinstance(a, Array) else Wgmma())(a, b)


UNITS: dict[str, Unit] = {"wgmma": Wgmma(), "mma": Mma()}
INTERPRETED: dict[str, Unit] = {"wgmma": InterpretedWgmma(), "mma": Reads()}
