"""What a kernel must do for its shape: products, and bytes that are copied, of each tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from kvjax.kernels.mosaic_gpu.plan import Plan, Shape

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
SCALE_BYTES = 4
# Columns of values come in multiples of so many rows of a matrix instruction.
M = 64
# Of a 16-bit matrix instruction.
DEPTH = 16


KernelName = Literal["decode", "latent", "ampere"]


class Planned(NamedTuple):
    """A plan, the shape that it is for, and the module of kvjax.kernels.mosaic_gpu to follow it."""

    shape: Shape
    plan: Plan
    kernel: KernelName = "decode"


@dataclass(frozen=True)
class Expected:
    """What the loops of a kernel must hold for each tile.

    Attributes:
      products: matrix instructions, by the beginning of their names.
      copies: what copies from global to shared memory, a regular expression.
      nbytes: that are copied.
      waits: of warps that only copy, for a stage to be free; 0 where those that copy multiply, too.
      scalars: most loads from global memory into the registers of a thread.
      exchanges: arrivals at barriers behind loads of what no copy will replace.
    """

    products: dict[str, int]
    copies: str
    nbytes: int
    waits: int
    scalars: int
    exchanges: int = 0


def expected(planned: Planned, page: int | None) -> Expected:
    """Reckoned from the shapes alone."""
    shape, plan, kernel = planned
    itemsize = ITEMSIZE[str(shape.stored)]
    shared = not shape.value_dim
    values = -(-(shape.value_dim or shape.key_dims[0]) // M) * M
    # Where values are no multiple of 64 columns wide, some are copied twice, for the units' sake.
    columns = sum(shape.key_dims) + (0 if shared else values)
    nbytes = plan.rows * columns * itemsize
    lookups = 0 if page is None else max(1, plan.rows // page)
    if kernel == "ampere":
        # Scales go straight to the threads that need them, two for each of two rows.
        scalars = 2 * lookups + 4 if shape.token_scales else lookups
        return Expected(
            _products(shape, plan, values), r"LDGSTS\.E\.BYPASS\.128$", nbytes, 0, scalars
        )
    if kernel == "latent":
        # One warpgroup gives the other's weights and factor back.
        return Expected(_wide_products(shape, plan), r"UTMALDG\b", nbytes, 0, lookups, 1)
    scales = 2 * SCALE_BYTES * plan.rows if shape.token_scales else 0
    return Expected(
        _products(shape, plan, values),
        r"UTMALDG\b",
        nbytes + scales,
        waits=1 if shared else 2,
        scalars=lookups,
    )


def _products(shape: Shape, plan: Plan, values: int) -> dict[str, int]:
    """S^T = K Q^T and O^T = V^T P^T, 64 rows of K or columns of V at once."""
    products = plan.rows // M * sum(-(-dim // DEPTH) for dim in shape.key_dims)
    products += values // M * (plan.rows // DEPTH)
    if plan.unit == "wgmma":
        return {f"HGMMA.64x{plan.heads}x16.F32": products}
    # Each warp multiplies 16 of the 64 rows, with 8 heads at once.
    return {"HMMA.16816.F32": products * plan.heads // 8}


def _wide_products(shape: Shape, plan: Plan) -> dict[str, int]:
    """S = Q K^T and, in two warpgroups, half the columns of O = P V, 64 heads at once."""
    half = shape.key_dims[0] // 2
    products = {f"HGMMA.{M}x{plan.rows}x16.F32": sum(shape.key_dims) // DEPTH}
    values = f"HGMMA.{M}x{half}x16.F32"
    return {**products, values: products.get(values, 0) + 2 * (plan.rows // DEPTH)}
