"""Inference: the jitted steps, sampling, eviction, generation."""

from kvjax.engine.compress import Eviction, compress
from kvjax.engine.generate import generate
from kvjax.engine.sampling import Sampler
from kvjax.engine.steps import decode, prefill
from kvjax.engine.text import Continuations, generate_text

__all__ = [
    "Continuations",
    "Eviction",
    "Sampler",
    "compress",
    "decode",
    "generate",
    "generate_text",
    "prefill",
]
