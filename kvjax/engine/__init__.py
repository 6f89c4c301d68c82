"""Inference: the jitted steps, sampling, generation."""

from kvjax.engine.generate import generate
from kvjax.engine.sampling import Sampler
from kvjax.engine.steps import decode, prefill
from kvjax.engine.text import generate_text

__all__ = ["Sampler", "decode", "generate", "generate_text", "prefill"]
