"""What a KV cache costs: bytes, intensity and the least time of a decode step.

Only arithmetic, only the standard library. A model is a `ModelSpec`, a tuple of `LayerSpec` that
`load` reads from a Hugging Face ``config.json``; codecs (`CodecSpec`) say how many bytes a record
takes, layouts (`Dense`, `Ring`, `Paged`, `Kept`) how many slots a sequence takes.
"""

from kvjax.sizing.account import CacheBytes
from kvjax.sizing.chips import CHIPS
from kvjax.sizing.codecs import CODECS, CodecSpec, Kivi, Part, Scaled, Tiled, codec
from kvjax.sizing.config import read_config
from kvjax.sizing.families import READERS, WRAPPERS
from kvjax.sizing.layer import LayerSpec, state_layer
from kvjax.sizing.layouts import Dense, Kept, LayoutSpec, Paged, Ring
from kvjax.sizing.placement import DEFINITIONS
from kvjax.sizing.plan import Demand, Plan, Spread, batch_floors, plan
from kvjax.sizing.readers import load
from kvjax.sizing.report import report
from kvjax.sizing.roofline import Chip, DecodeFloor
from kvjax.sizing.spec import ModelSpec
from kvjax.sizing.states import Pool, State
from kvjax.sizing.sweeps import batch_ceiling, batch_sweep, context_sweep, crossover_tokens
from kvjax.sizing.weights import WEIGHT_PRECISIONS, Experts, Precision, Weights, ffn_parameters

__all__ = [
    "CHIPS",
    "CODECS",
    "DEFINITIONS",
    "READERS",
    "WEIGHT_PRECISIONS",
    "WRAPPERS",
    "CacheBytes",
    "Chip",
    "CodecSpec",
    "DecodeFloor",
    "Demand",
    "Dense",
    "Experts",
    "Kept",
    "Kivi",
    "LayerSpec",
    "LayoutSpec",
    "ModelSpec",
    "Paged",
    "Part",
    "Plan",
    "Pool",
    "Precision",
    "Ring",
    "Scaled",
    "Spread",
    "State",
    "Tiled",
    "Weights",
    "batch_ceiling",
    "batch_floors",
    "batch_sweep",
    "codec",
    "context_sweep",
    "crossover_tokens",
    "ffn_parameters",
    "load",
    "plan",
    "read_config",
    "report",
    "state_layer",
]
