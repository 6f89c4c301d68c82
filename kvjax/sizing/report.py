"""One model's figures as plain data, for tables and JSON."""

import math
from typing import Any

from kvjax.sizing import chips, codecs
from kvjax.sizing.roofline import Chip
from kvjax.sizing.spec import ModelSpec

_WEIGHT_BYTES = 2  # bf16 and f16, the dtypes in which weights are published


def report(
    spec: ModelSpec, tokens: int, batch: int = 1, codec: str = "bf16", chip: str | None = None
) -> dict[str, Any]:
    """What `spec` costs for `batch` sequences of `tokens` tokens, units in the names.

    A figure that has no limit (tokens that fit, where every layer has a window) is None; so are
    those of the weights where they are not known. `weight_bytes` and what follows from it are at
    two bytes a parameter. `on_chip` is there where a chip is named.
    """
    encoding = codecs.codec(codec)
    cache = spec.cache_bytes(tokens, batch, encoding)
    figures: dict[str, Any] = {
        "model_type": spec.model_type,
        "layers": [
            {
                "count": count,
                "kind": layer.kind,
                "query_heads": layer.query_heads,
                "kv_heads": layer.kv_heads,
                "key_dim": layer.key_dim,
                "value_dim": layer.value_dim,
                "window": layer.window,
            }
            for layer, count in spec.layer_counts()
        ],
        "codec": encoding.name,
        "tokens": tokens,
        "batch": batch,
        "definition": "kvjax",
        "bytes_per_token": spec.bytes_per_token(encoding),
        "ideal_bytes": cache.ideal,
        "allocated_bytes": cache.allocated,
        "read_per_step_bytes": cache.read_per_step,
        "state_bytes": cache.state,
        "table_bytes": cache.tables,
        "intensity_flop_per_byte": spec.intensity(encoding, at=max(tokens, 1)),
        "attention_parameters": spec.attention_parameters,
        "parameters": None,
        "weight_bytes": None,
        "tokens_where_cache_equals_weights": None,
    }
    if spec.weights is not None:
        weight_bytes = spec.parameters * _WEIGHT_BYTES
        figures["parameters"] = spec.parameters
        figures["weight_bytes"] = weight_bytes
        crossover = spec.tokens_that_fit(weight_bytes, batch, encoding)
        figures["tokens_where_cache_equals_weights"] = _finite(crossover)
    if chip is not None:
        figures["on_chip"] = _on_chip(spec, tokens, batch, encoding, chips.chip(chip))
    return figures


def _on_chip(
    spec: ModelSpec, tokens: int, batch: int, encoding: codecs.CodecSpec, chip: Chip
) -> dict[str, Any]:
    """Figures of one chip that holds all weights and the cache."""
    floor = spec.decode_floor(chip, tokens, batch, codec=encoding)
    free = chip.memory_bytes - spec.parameters * _WEIGHT_BYTES
    return {
        "chip": chip.name,
        "memory_bytes": chip.memory_bytes,
        "ridge_flop_per_byte": chip.ridge,
        "tokens_that_fit_beside_weights": _finite(
            spec.tokens_that_fit(max(free, 0), batch, encoding)
        ),
        "decode_floor_seconds": floor.seconds,
        "binds": floor.binds,
        "ceiling_seconds": dict(floor.ceilings),
        "tokens_per_second": batch / floor.seconds,
        "source": chip.source,
    }


def _finite(tokens: float) -> float | None:
    return None if math.isinf(tokens) else tokens
