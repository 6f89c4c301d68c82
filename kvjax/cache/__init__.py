"""Caches: in which slot a record lives (layouts) and how it is encoded (codecs)."""

from kvjax.cache.container import Cache, CodecChoice, LayoutChoice, PerLayer, init_layer_cache
from kvjax.cache.factors import Factors
from kvjax.cache.kept import KeptCache
from kvjax.cache.kivi import KiviCache
from kvjax.cache.kivi_codec import Kivi
from kvjax.cache.latents import Latents
from kvjax.cache.layouts import Dense, Ring, Sight, SinkRing
from kvjax.cache.paged import Paged, PagedCache
from kvjax.cache.protocol import Block, CapacityError, LayerCache, Record
from kvjax.cache.scales import LayerScales, Scales
from kvjax.cache.slots import SlotCache
from kvjax.cache.tied import Tied
from kvjax.cache.view import View, with_rope_keys

__all__ = [
    "Block",
    "Cache",
    "CapacityError",
    "CodecChoice",
    "Dense",
    "Factors",
    "KeptCache",
    "Kivi",
    "KiviCache",
    "Latents",
    "LayerCache",
    "LayerScales",
    "LayoutChoice",
    "Paged",
    "PagedCache",
    "PerLayer",
    "Record",
    "Ring",
    "Scales",
    "Sight",
    "SinkRing",
    "SlotCache",
    "Tied",
    "View",
    "init_layer_cache",
    "with_rope_keys",
]
