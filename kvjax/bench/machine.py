"""What a result was measured on."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

import kvjax

PACKAGES = ("jax", "jaxlib", "numpy", "flax")


def threads() -> int:
    """Cores this process may use: the threads that XLA takes, and that a peer is given."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe() -> dict[str, Any]:
    """Device, processor, load and versions, as plain data."""
    device = jax.devices()[0]
    return {
        "backend": device.platform,
        "device": device.device_kind,
        "cpu": _cpu_model(),
        "threads": threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": {
            "python": platform.python_version(),
            "kvjax": kvjax.__version__,
            **{name: found for name in PACKAGES if (found := _version(name)) is not None},
        },
    }


def free_bytes() -> int | None:
    """Bytes that arrays may still take on the default device; None where it does not say."""
    stats = jax.devices()[0].memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def check_memory(needed: int, what: str) -> None:
    """ValueError where `needed` bytes are more than the device has free."""
    free = free_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"{what}: {needed / 2**30:.1f} GiB are needed at once, {free / 2**30:.1f} GiB are free"
        )


def _cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def _read(path: str) -> str:
    file = Path(path)
    return file.read_text("utf-8") if file.exists() else ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
