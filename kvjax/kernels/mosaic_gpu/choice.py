"""Which kernel serves a call, and by which plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvjax.kernels.mosaic_gpu import ampere, decode, latent
from kvjax.kernels.mosaic_gpu.plan import Plan, Shape, make_latent_plan, make_plan
from kvjax.kernels.mosaic_gpu.settings import Outputs
from kvjax.kernels.mosaic_gpu.support import limits_of, unit_of


class Choice(NamedTuple):
    """A kernel, which takes `Inputs`, the plan, and what scores are made by."""

    kernel: Callable[..., Outputs]
    plan: Plan


def choose(shape: Shape, capability: tuple[int, int], multiprocessors: int) -> Choice:
    """The best for a GPU of that compute capability, for a call that `support` lets through."""
    unit = unit_of(capability)
    assert unit is not None
    if unit == "wgmma" and (plan := make_latent_plan(shape, multiprocessors)) is not None:
        return Choice(latent.decode, plan)
    kernel = ampere.decode if capability in ampere.LIMITS else decode.decode
    return Choice(kernel, make_plan(shape, unit, multiprocessors, limits_of(capability)))
