"""The report of one model as rows of text, every number with its unit."""

from collections.abc import Iterator
from typing import Any


def title(figures: dict[str, Any]) -> str:
    """What the figures of `report` are for."""
    return "{model_type}: {batch} × {tokens:,} tokens, {codec}".format(**figures)


def rows(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of each figure of `report`."""
    for layer in figures["layers"]:
        yield "layers", _layer(layer)
    yield "per token", _bytes(figures["bytes_per_token"])
    yield "ideal", _bytes(figures["ideal_bytes"])
    yield "allocated (kvjax)", _bytes(figures["allocated_bytes"])
    yield "read per decode step", _bytes(figures["read_per_step_bytes"])
    yield "lengths and flags", _bytes(figures["table_bytes"])
    yield "decode attention", f"{figures['intensity_flop_per_byte']:.3g} FLOP/B"
    if figures["parameters"] is not None:
        yield "parameters", f"{figures['parameters']:,}"
        yield "weights at 2 bytes", _bytes(figures["weight_bytes"])
        yield (
            "cache equals weights at",
            _tokens(figures["tokens_where_cache_equals_weights"], figures["batch"]),
        )
    if "on_chip" in figures:
        yield from _chip_rows(figures["on_chip"], figures["batch"])


def _chip_rows(chip: dict[str, Any], batch: int) -> Iterator[tuple[str, str]]:
    yield f"{chip['chip']} memory", _bytes(chip["memory_bytes"])
    yield "fits beside the weights", _tokens(chip["tokens_that_fit_beside_weights"], batch)
    yield (
        "decode step takes at least",
        f"{chip['decode_floor_seconds'] * 1e3:.3f} ms ({chip['binds']} binds)",
    )
    for ceiling, seconds in chip["ceiling_seconds"].items():
        yield f"  {ceiling} ceiling", f"{seconds * 1e3:.3f} ms"
    yield "at most", f"{chip['tokens_per_second']:,.0f} tokens/s"
    yield "source", chip["source"]


def _layer(layer: dict[str, Any]) -> str:
    window = "" if layer["window"] is None else f", window {layer['window']:,}"
    return (
        f"{layer['count']} × {layer['query_heads']} query heads, {layer['kv_heads']} KV heads "
        f"of {layer['key_dim']} + {layer['value_dim']}{window}"
    )


def _bytes(count: int) -> str:
    """Exact bytes, and the same in the largest binary unit that they fill."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    exact = f"{count:,} B"
    return exact if unit == "B" else f"{exact} = {size:.4g} {unit}"


def _tokens(count: int | None, batch: int) -> str:
    if count is None:
        return "any number of tokens"
    return f"{count:,} tokens" + (" a sequence" if batch > 1 else "")
