"""Caches: in which slot a record lives (layouts) and how it is encoded (codecs)."""

from kvjax.cache.container import Cache, init_layer_cache
from kvjax.cache.dense import DenseCache
from kvjax.cache.protocol import Block, CapacityError, LayerCache, Record

__all__ = [
    "Block",
    "Cache",
    "CapacityError",
    "DenseCache",
    "LayerCache",
    "Record",
    "init_layer_cache",
]
