"""One model's figures as plain data, for tables, plots and JSON."""

import math
from dataclasses import asdict
from typing import Any, Unpack

from kvjax.sizing import chips, codecs
from kvjax.sizing.checks import whole
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
    a chip is named, and is of one of the tp x pp x dp that the cache is spread over.
    """
    encoding, placement = codecs.codec(codec), Placement(**placing)
    tokens, batch = whole("tokens", tokens, 0), whole("batch", batch)
    spread = {"tp": placement.tp, "pp": placement.pp}
    cache = spec.cache_bytes(tokens, batch, encoding, **placing)
    figures: dict[str, Any] = {
        "model_type": spec.model_type,
        "layers": [_layer(layer, count) for layer, count in spec.layer_counts()],
        "codec": encoding.name,
        "tokens": tokens,
        "batch": batch,
        **asdict(placement),
        "bytes_per_token": spec.bytes_per_token(encoding, **spread),
        "bytes_per_token_at_length": spec.bytes_per_token(encoding, at=tokens, **spread),
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
        share = weight_bytes / (placement.tp * placement.pp)
        figures["tokens_where_cache_equals_weights"] = _fitting(
            spec, share, batch, encoding, placing
        )
    if chip is not None:
        figures["on_chip"] = _on_chip(spec, figures, chips.chip(chip), encoding, placing)
    return figures


def _fitting(
    spec: ModelSpec, budget: float, batch: int, encoding: codecs.CodecSpec, placing: Placing
) -> float | None:
    """As `tokens_that_fit`, but None without a limit, and 0 where not even an empty cache fits."""
    if spec.cache_bytes(0, batch, encoding, **placing).allocated > budget:
        return 0
    tokens = spec.tokens_that_fit(budget, batch, encoding, **placing)
    return None if math.isinf(tokens) else tokens


def _layer(layer: LayerSpec, count: int) -> dict[str, Any]:
    """What a kind of layer keeps; fields that do not apply to it are left out."""
    figures = {name: value for name, value in asdict(layer).items() if value not in (0, None, ())}
    figures.pop("hf", None)
    if layer.rope_heads == 1:
        del figures["rope_heads"]
    if layer.kind != "state":
        figures["window"] = layer.window
    return {"count": count, **figures}


def _on_chip(
    spec: ModelSpec,
    figures: dict[str, Any],
    chip: Chip,
    encoding: codecs.CodecSpec,
    placing: Placing,
) -> dict[str, Any]:
    """Figures of one chip that holds its share of the weights, evenly cut, and of the cache.

    The stages work on parts of a replica's batch at once, and a step takes as long as the whole
    model does for one part.
    """
    placement, batch = Placement(**placing), figures["batch"]
    floor = spec.decode_floor(
        chip,
        figures["tokens"],
        math.ceil(math.ceil(batch / placement.dp) / placement.pp),
        codec=encoding,
        tp=placement.tp,
        source_tokens=placement.source_tokens,
    )
    weights = spec.parameters * _WEIGHT_BYTES / (placement.tp * placement.pp)
    free = chip.memory_bytes - weights - figures["state_bytes"]
    return {
        "chip": chip.name,
        "memory_bytes": chip.memory_bytes,
        "ridge_flop_per_byte": chip.ridge,
        "tokens_that_fit_beside_weights": _fitting(spec, free, batch, encoding, placing)
        if free >= 0
        else 0,
        "decode_floor_seconds": floor.seconds,
        "binds": floor.binds,
        "ceiling_seconds": dict(floor.ceilings),
        "tokens_per_second": batch / floor.seconds,
        "source": chip.source,
    }
