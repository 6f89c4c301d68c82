"""What a KV cache costs: bytes, intensity and the least time of a decode step.

Only arithmetic, only the standard library. A model is a `ModelSpec`, a tuple of `LayerSpec` that
`load` reads from a Hugging Face ``config.json``; codecs (`CodecSpec`) say how many bytes a record
takes, layouts (`Dense`, `Ring`, `Paged`) how many slots a sequence takes.
"""

from kvjax.sizing.account import DEFINITIONS, CacheBytes
from kvjax.sizing.chips import CHIPS
from kvjax.sizing.codecs import CODECS, CodecSpec, Kivi, Part, Scaled, Tiled, codec
from kvjax.sizing.config import read_config
from kvjax.sizing.families import READERS
from kvjax.sizing.layer import LayerSpec, state_layer
from kvjax.sizing.layouts import Dense, LayoutSpec, Paged, Ring
from kvjax.sizing.readers import load
from kvjax.sizing.report import report
from kvjax.sizing.roofline import Chip, DecodeFloor
from kvjax.sizing.spec import ModelSpec
from kvjax.sizing.states import Pool, State
from kvjax.sizing.weights import Weights, ffn_parameters

__all__ = [
    "CHIPS",
    "CODECS",
    "DEFINITIONS",
    "READERS",
    "CacheBytes",
    "Chip",
    "CodecSpec",
    "DecodeFloor",
    "Dense",
    "Kivi",
    "LayerSpec",
    "LayoutSpec",
    "ModelSpec",
    "Paged",
    "Part",
    "Pool",
    "Ring",
    "Scaled",
    "State",
    "Tiled",
    "Weights",
    "codec",
    "ffn_parameters",
    "load",
    "read_config",
    "report",
    "state_layer",
]
