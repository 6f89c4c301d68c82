"""The GPU that a call would run on, as far as the choice of an implementation depends on it."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Gpu(NamedTuple):
    """A CUDA GPU.

    Attributes:
      capability: compute capability, such as (9, 0).
      multiprocessors: how many it has.
    """

    capability: tuple[int, int]
    multiprocessors: int


def current_gpu() -> Gpu | None:
    """The default device, if that is a CUDA GPU; it may be one that is only compiled for."""
    device = jax.config.jax_default_device
    if device is None:
        device = jax.local_devices()[0]
    elif isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    capability = getattr(device, "compute_capability", "")
    # On ROCm it is a name, such as gfx942.
    if device.platform != "gpu" or not capability[:1].isdigit():
        return None
    major, minor = capability.split(".")
    return Gpu((int(major), int(minor)), device.core_count)
