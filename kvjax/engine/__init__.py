"""Inference: the jitted steps, sampling, generation."""

from kvjax.engine.generate import generate
from kvjax.engine.sampling import Sampler
from kvjax.engine.steps import decode, prefill

__all__ = ["Sampler", "decode", "generate", "prefill"]
