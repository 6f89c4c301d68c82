"""One model's figures as plain data, for tables, plots and JSON."""

import math
from dataclasses import asdict
from typing import Any, Unpack

from kvjax.sizing import chips, codecs
from kvjax.sizing.layer import LayerSpec
from kvjax.sizing.placement import Placement, Placing
from kvjax.sizing.roofline import Chip
from kvjax.sizing.spec import ModelSpec

_WEIGHT_BYTES = 2  # bf16 and f16, the dtypes in which weights are published


def report(
    spec: ModelSpec,
    tokens: int,
    batch: int = 1,
    codec: str = "bf16",
    chip: str | None = None,
    **placing: Unpack[Placing],
) -> dict[str, Any]:
    """What `spec` costs for `batch` sequences of `tokens` tokens, units in the names.

    A figure that has no limit (tokens that fit, where every layer has a window) is None; so are
    those of the weights where they are not known, and the intensity where nothing attends.
    `weight_bytes` and what follows from it are at two bytes a parameter. `on_chip` is there where
    a chip is named.
    """
    encoding, placement = codecs.codec(codec), Placement(**placing)
    cache = spec.cache_bytes(tokens, batch, encoding, **placing)
    figures: dict[str, Any] = {
        "model_type": spec.model_type,
        "layers": [_layer(layer, count) for layer, count in spec.layer_counts()],
        "codec": encoding.name,
        "tokens": tokens,
        "batch": batch,
        **asdict(placement),
        "bytes_per_token": spec.bytes_per_token(encoding, tp=placement.tp),
        "bytes_per_token_at_length": spec.bytes_per_token(encoding, at=tokens, tp=placement.tp),
        "ideal_bytes": cache.ideal,
        "allocated_bytes": cache.allocated,
        "read_per_step_bytes": cache.read_per_step,
        "state_bytes": cache.state,
        "table_bytes": cache.tables,
        "total_bytes": cache.total,
        "intensity_flop_per_byte": spec.intensity(encoding, at=max(tokens, 1))
        if cache.read_per_step
        else None,
        "attention_parameters": spec.attention_parameters,
        "parameters": None,
        "weight_bytes": None,
        "tokens_where_cache_equals_weights": None,
    }
    if spec.weights is not None:
        weight_bytes = spec.parameters * _WEIGHT_BYTES
        figures["parameters"] = spec.parameters
        figures["weight_bytes"] = weight_bytes
        crossover = spec.tokens_that_fit(weight_bytes, batch, encoding, **placing)
        figures["tokens_where_cache_equals_weights"] = _finite(crossover)
    if chip is not None:
        figures["on_chip"] = _on_chip(spec, tokens, batch, encoding, chips.chip(chip))
    return figures


def _layer(layer: LayerSpec, count: int) -> dict[str, Any]:
    """What a kind of layer keeps; fields that do not apply to it are left out."""
    figures = {name: value for name, value in asdict(layer).items() if value not in (0, None, ())}
    figures.pop("hf", None)
    if layer.kind != "state":
        figures["window"] = layer.window
    return {"count": count, **figures}


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
