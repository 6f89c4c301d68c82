"""``kvjax plan``."""

from typing import Annotated

import typer

from kvjax.cli.common import JsonOption, one_clear_error, print_columns, print_json


def plan(
    config: Annotated[str, typer.Argument(help="A config.json, or a directory that has one.")],
    tokens: Annotated[
        str,
        typer.Option(
            help="Tokens a sequence holds; or lengths with their shares, 2048:0.7,32768:0.3."
        ),
    ] = "8192",
    batch: Annotated[int | None, typer.Option(help="Sequences decoded at once.")] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(help="Of all sequences together; instead of --batch.")
    ] = None,
    chip: Annotated[
        list[str] | None, typer.Option(help="A kind of chip; repeat for more. Default: all known.")
    ] = None,
    codec: Annotated[str, typer.Option(help="How K and V are stored.")] = "bf16",
    weights: Annotated[
        str, typer.Option(help="How the weights are stored: bf16, fp8, int4, mxfp4, ...")
    ] = "bf16",
    page_size: Annotated[int | None, typer.Option(help="Slots a page of the cache.")] = None,
    memory_share: Annotated[
        float, typer.Option(help="Share of a chip's memory that weights and cache may take.")
    ] = 0.9,
    source_tokens: Annotated[
        int, typer.Option(help="Tokens of the source of an encoder-decoder model.")
    ] = 0,
    max_tp: Annotated[int, typer.Option(help="The most tensor-parallel shards.")] = 8,
    max_chips: Annotated[int, typer.Option(help="The most chips that are tried.")] = 1024,
    plot: Annotated[
        str | None, typer.Option(help="A PNG to draw the floor of a step against the batch into.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say which chips a model needs, and how many, for a batch or a rate of tokens.

    Floors are what a step takes at least: no launches, activations or traffic between chips.

    \b
    Examples:
      kvjax plan deepseek-v3 --tokens 32768 --batch 256 --chip H200 --chip B200 --weights fp8
      kvjax plan llama-3-8b --tokens 2048:0.7,32768:0.3 --tokens-per-second 20000
    """
    from kvjax import sizing
    from kvjax.sizing import text

    with one_clear_error():
        if batch is None and tokens_per_second is None:
            batch = 1
        spec = sizing.load(config)
        demand = sizing.Demand(
            _lengths(tokens),
            batch,
            tokens_per_second,
            codec,
            weights,
            page_size,
            memory_share,
            source_tokens,
        )
        plans = sizing.plan(
            spec, demand, chip or list(sizing.CHIPS), max_tp=max_tp, max_chips=max_chips
        )
        if plot is not None:
            from kvjax.bench import size_plots

            size_plots.floor_against_batch(sizing.batch_floors(spec, demand, plans), plot)
    if as_json:
        figures = [found.figures() for found in plans]
        print_json({"config": config, "model_type": spec.model_type, "plans": figures})
    else:
        rows = text.plan_rows([found.figures() for found in plans])
        print_columns(text.plan_title(spec.model_type, demand), text.PLAN_COLUMNS, rows)
    if plot is not None:
        typer.echo(plot, err=True)


def _lengths(tokens: str) -> dict[int, float]:
    """Lengths and shares from "8192" or "2048:0.7,32768:0.3"."""
    lengths: dict[int, float] = {}
    try:
        for part in tokens.split(","):
            length, _, share = part.partition(":")
            lengths[int(length)] = lengths.get(int(length), 0.0) + float(share or 1)
    except ValueError:
        raise ValueError(
            f"--tokens {tokens!r}: accepted: a whole number, or lengths with their shares such as "
            "2048:0.7,32768:0.3"
        ) from None
    return lengths
