"""kvjax: what a KV cache costs, how to shrink it, how fast it decodes, how to convert checkpoints.

The parts are imported when they are first used, so that ``import kvjax`` and the sizing arithmetic
need neither jax nor numpy.
"""

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"

_PARTS = ("sizing", "cache", "ops", "nn", "models", "evict", "convert", "train", "engine", "bench")


def __getattr__(name: str) -> ModuleType:
    """Import the part `name` on first use (PEP 562)."""
    if name in _PARTS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its parts: {_PARTS}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PARTS])
