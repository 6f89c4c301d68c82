"""Reports of one model, or of several side by side, as rows of text; every number has its unit."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax.sizing.plan import Demand

# How a layer with records is described, by its kind.
_RECORDS = {
    "attention": "{query_heads} query heads, {kv_heads} KV heads of {key_dim} + {value_dim}",
    "latent": "{query_heads} query heads, {kv_heads} latent of {latent_rank}, rope key {rope}",
    "tied": "{query_heads} query heads, {kv_heads} KV heads of {key_dim}, K and V the same",
    "factors": "{query_heads} query heads, {key_rank} + {value_rank} factors of {key_dim}",
}


def title(figures: dict[str, Any]) -> str:
    """What the figures of `report` are for."""
    says = "{batch:,} × {tokens:,} tokens, {codec}, allocated as by {definition}".format(**figures)
    if figures["source_tokens"]:
        says += f", source of {figures['source_tokens']:,} tokens"
    if figures["page_size"] is not None:
        says += f", pages of {figures['page_size']:,}"
    if figures["in_flight"] > 1:
        says += f", {figures['in_flight']:,} tokens in flight"
    spread = [f"{name} {figures[name]:,}" for name in ("tp", "pp", "dp") if figures[name] > 1]
    return says + (f"; cache of one device of {' × '.join(spread)}" if spread else "")


def rows(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of each figure of `report`."""
    yield "model", figures["model_type"]
    for layer in figures["layers"]:
        yield "layers", describe(layer)
    yield "per token", nbytes(figures["bytes_per_token"])
    yield "per token at that length", nbytes(figures["bytes_per_token_at_length"])
    yield "ideal", nbytes(figures["ideal_bytes"])
    yield f"allocated ({figures['definition']})", nbytes(figures["allocated_bytes"])
    yield "read per decode step", nbytes(figures["read_per_step_bytes"])
    if figures["state_bytes"]:
        yield f"states ({figures['definition']})", nbytes(figures["state_bytes"])
    yield "lengths, flags, tables", nbytes(figures["table_bytes"])
    if figures["intensity_flop_per_byte"] is not None:
        yield "decode attention", f"{figures['intensity_flop_per_byte']:.3g} FLOP/B"
    if figures["parameters"] is not None:
        yield "parameters", f"{figures['parameters']:,}"
        yield "weights at 2 bytes", nbytes(figures["weight_bytes"])
        yield (
            "cache equals weights at",
            _tokens(figures["tokens_where_cache_equals_weights"], figures["batch"]),
        )
    if "on_chip" in figures:
        yield from _chip_rows(figures["on_chip"], figures["batch"])


def side_by_side(reports: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of several reports as one table: a name, then one value a model.

    A model with several kinds of layers has one line for each in its cell. Where there are several
    models, cells are narrow: what a figure equals goes to a line of its own.
    """
    columns: list[dict[str, str]] = []
    for figures in reports:
        column: dict[str, str] = {}
        for name, value in rows(figures):
            if len(reports) > 1:
                value = value.replace(" = ", "\n= ")
            column[name] = f"{column[name]}\n{value}" if name in column else value
        columns.append(column)
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, *(column.get(name, "-") for column in columns)) for name in names]


# Heads of the columns after the first; what is printed under them are lower and upper bounds.
PLAN_COLUMNS = (
    "weights + cache\nof usable GiB",
    "sequences\nof most",
    "ms a step,\nat least",
    "binds",
    "tokens/s,\nat most",
)


def plan_title(model_type: str, demand: "Demand") -> str:
    """What plans are for."""
    lengths = ", ".join(
        f"{length:,}" if len(demand.lengths) == 1 else f"{length:,}: {share:g}"
        for length, share in demand.lengths.items()
    )
    asked = (
        f"{demand.batch:,} {'sequence' if demand.batch == 1 else 'sequences'}"
        if demand.batch is not None
        else f"{demand.tokens_per_second:,g} tokens/s"
    )
    source = f" and a source of {demand.source_tokens:,}" if demand.source_tokens else ""
    return (
        f"{model_type}: {asked} of {lengths} tokens{source}, weights in {demand.weights}, "
        f"cache in {demand.codec}"
    )


def plan_rows(plans: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A row for each plan, under `PLAN_COLUMNS`."""
    for figures in plans:
        if not figures["fits"]:
            yield (figures["chip"], figures["reason"], *("-" for _ in PLAN_COLUMNS[1:]))
            continue
        most = figures["largest_batch"]
        spread = ", ".join(f"{name} {figures[name]}" for name in ("tp", "pp", "dp"))
        weights, cache, usable = (
            f"{figures[name] / 2**30:,.1f}"
            for name in ("weight_bytes", "cache_bytes", "usable_bytes")
        )
        yield (
            f"{figures['chips']} × {figures['chip']}\n{spread}",
            f"{weights} + {cache}\nof {usable}",
            f"{figures['batch']:,}\nof {'any number' if most is None else f'{most:,}'}",
            f"{figures['decode_floor_seconds'] * 1e3:.3g}",
            figures["binds"],
            f"{figures['tokens_per_second']:,.0f}",
        )


def describe(layer: dict[str, Any]) -> str:
    """One kind of layer in words."""
    if layer["kind"] == "state":
        says = "without records"
    else:
        times = f"{layer['rope_heads']} × " if "rope_heads" in layer else ""
        rope = f"{times}{layer.get('rope_dim', 0)}"
        says = _RECORDS[layer["kind"]].format(**layer, rope=rope)
    if layer.get("cross"):
        says += ", of the source"
    if layer.get("window"):
        says += f", window {layer['window']:,}"
    if layer.get("chunk"):
        says += f", chunks of {layer['chunk']:,}"
    if "shares_with" in layer:
        says += f", read from layer {layer['shares_with']}"
    if "index_dim" in layer:
        says += f", index key {layer['index_dim']}"
    for pool in layer.get("pools", ()):
        says += f", one entry of {pool['width']} for {pool['ratio']} tokens"
    for state in layer.get("states", ()):
        says += f", {state['name']} state of {state['elements']:,}"
    return f"{layer['count']} × {says}"


def nbytes(count: int) -> str:
    """Exact bytes, and the same in the largest binary unit that they fill."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    exact = f"{count:,} B"
    return exact if unit == "B" else f"{exact} = {size:.4g} {unit}"


def _chip_rows(chip: dict[str, Any], batch: int) -> Iterator[tuple[str, str]]:
    yield f"{chip['chip']} memory", nbytes(chip["memory_bytes"])
    yield "fits beside the weights", _tokens(chip["tokens_that_fit_beside_weights"], batch)
    yield (
        "decode step takes at least",
        f"{chip['decode_floor_seconds'] * 1e3:.3f} ms ({chip['binds']} binds)",
    )
    for ceiling, seconds in chip["ceiling_seconds"].items():
        yield f"  {ceiling} ceiling", f"{seconds * 1e3:.3f} ms"
    yield "at most", f"{chip['tokens_per_second']:,.0f} tokens/s"
    yield "source", chip["source"]


def _tokens(count: int | None, batch: int) -> str:
    if count is None:
        return "any number of tokens"
    return f"{count:,} tokens" + (" a sequence" if batch > 1 else "")
