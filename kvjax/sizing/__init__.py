"""What a KV cache costs: bytes, intensity and the least time of a decode step.

Only arithmetic, only the standard library. A model is a `ModelSpec`, a tuple of `LayerSpec` that
`load` reads from a Hugging Face ``config.json``; codecs (`CodecSpec`) say how many bytes a record
takes, layouts (`Dense`, `Ring`, `Paged`) how many slots a sequence takes.
"""

from kvjax.sizing.chips import CHIPS
from kvjax.sizing.codecs import CODECS, CodecSpec, codec
from kvjax.sizing.config import read_config
from kvjax.sizing.layer import LayerSpec
from kvjax.sizing.layouts import Dense, LayoutSpec, Paged, Ring
from kvjax.sizing.readers import READERS, load
from kvjax.sizing.report import report
from kvjax.sizing.roofline import Chip, DecodeFloor
from kvjax.sizing.spec import CacheBytes, ModelSpec
from kvjax.sizing.weights import Weights, ffn_parameters

__all__ = [
    "CHIPS",
    "CODECS",
    "READERS",
    "CacheBytes",
    "Chip",
    "CodecSpec",
    "DecodeFloor",
    "Dense",
    "LayerSpec",
    "LayoutSpec",
    "ModelSpec",
    "Paged",
    "Ring",
    "Weights",
    "codec",
    "ffn_parameters",
    "load",
    "read_config",
    "report",
]
