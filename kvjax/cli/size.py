"""``kvjax size``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.cli.common import JsonOption, one_clear_error, print_columns, print_json


def size(
    configs: Annotated[
        list[str], typer.Argument(help="A config.json, or a directory that has one; or several.")
    ],
    tokens: Annotated[int, typer.Option(help="Tokens each sequence holds.")] = 4096,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    codec: Annotated[
        str, typer.Option(help="How K and V are stored: f32, bf16, fp8, int8, int4, kivi2, ...")
    ] = "bf16",
    definition: Annotated[
        str,
        typer.Option(help="Whose allocated bytes: kvjax, or transformers' hf-dynamic, hf-static."),
    ] = "kvjax",
    page_size: Annotated[
        int | None, typer.Option(help="Slots a page; default: one run of slots a sequence.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel shards; figures are of one.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages; figures are of the largest.")] = 1,
    dp: Annotated[int, typer.Option(help="Replicas that share the batch; of the fullest.")] = 1,
    source_tokens: Annotated[
        int, typer.Option(help="Tokens of the source of an encoder-decoder model.")
    ] = 0,
    in_flight: Annotated[int, typer.Option(help="Tokens that one step writes.")] = 1,
    chip: Annotated[
        str | None, typer.Option(help="Add the decode floor on this chip: H100-SXM, H200, ...")
    ] = None,
    plot: Annotated[
        str | None, typer.Option(help="A PNG to draw bytes against context into.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what the KV cache of a model costs, or of several side by side, from config.json.

    \b
    Examples:
      kvjax size config.json --tokens 8192 --batch 16 --chip H200
      kvjax size llama-3-8b deepseek-v3 gemma-3-27b --tokens 32768 --plot bytes.png
    """
    from kvjax import sizing
    from kvjax.sizing import text

    placing: dict[str, Any] = {
        "definition": definition,
        "page_size": page_size,
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "source_tokens": source_tokens,
        "in_flight": in_flight,
    }
    with one_clear_error():
        specs = dict(zip(_names(configs), map(sizing.load, configs), strict=True))
        reports = [
            {"config": name, **sizing.report(spec, tokens, batch, codec, chip, **placing)}
            for name, spec in specs.items()
        ]
        if plot is not None:
            from kvjax.bench import size_plots

            size_plots.bytes_against_context(specs, plot, batch=batch, codec=codec, **placing)
    if as_json:
        print_json(reports if len(reports) > 1 else reports[0])
    else:
        names = [report["config"] for report in reports]
        columns = text.side_by_side(reports)
        print_columns(text.title(reports[0]), names if len(names) > 1 else None, columns)
    if plot is not None:
        typer.echo(plot, err=True)


def _names(configs: list[str]) -> list[str]:
    """The directory of each config, or the file where it has another name; all different."""
    paths = [Path(config) for config in configs]
    short = [(path.resolve().parent if path.name == "config.json" else path).name for path in paths]
    names = [
        name if name and short.count(name) == 1 else config
        for name, config in zip(short, configs, strict=True)
    ]
    seen = [names[:index].count(name) for index, name in enumerate(names)]
    return [f"{name} ({n + 1})" if n else name for name, n in zip(names, seen, strict=True)]
