"""Inference: the jitted steps, sampling, eviction, generation, scoring, calibration."""

from kvjax.engine.calibrate import calibrate, random_tokens
from kvjax.engine.codec_error import CodecError, codec_error
from kvjax.engine.compress import Eviction, compress
from kvjax.engine.generate import generate
from kvjax.engine.sampling import Sampler
from kvjax.engine.score import Scores, score
from kvjax.engine.steps import decode, prefill
from kvjax.engine.text import Continuations, generate_text

__all__ = [
    "CodecError",
    "Continuations",
    "Eviction",
    "Sampler",
    "Scores",
    "calibrate",
    "codec_error",
    "compress",
    "decode",
    "generate",
    "generate_text",
    "prefill",
    "random_tokens",
    "score",
]
