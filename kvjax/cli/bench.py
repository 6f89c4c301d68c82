"""``kvjax bench``."""

import sys
from typing import Annotated, Any

import typer

from kvjax.cli.common import JsonOption, one_clear_error, print_json


def bench(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Model directories or config.json files; none: attention alone."),
    ] = None,
    batch: Annotated[str, typer.Option(help="B: rows, one number or several.")] = "4",
    length: Annotated[str, typer.Option(help="Live tokens a row.")] = "2048",
    capacity: Annotated[
        int | None, typer.Option(help="Slots a row; default: as many as live tokens.")
    ] = None,
    codec: Annotated[str, typer.Option(help="How K and V are stored.")] = "f32,bf16",
    query_heads: Annotated[int, typer.Option(help="N, of attention alone.")] = 32,
    kv_heads: Annotated[str, typer.Option(help="K, of attention alone.")] = "32,8,1",
    head_dim: Annotated[str, typer.Option(help="H, of attention alone.")] = "128",
    peers: Annotated[
        str, typer.Option(help="Whom to compare attention with; '' for nobody.")
    ] = "jax.nn,flax.nnx,torch",
    torch_python: Annotated[
        str | None, typer.Option(help="An interpreter that has torch; default: this one.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="A named run in place of shapes and peers: acceptance, caches."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Weights of the models: f32, bf16; default: as stored.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Samples of each contender, at least 3.")] = 7,
    seed: Annotated[int, typer.Option(help="Of the numbers and of the order of turns.")] = 0,
    out: Annotated[
        str | None, typer.Option(help="A directory for JSON, Markdown and plots.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure decode: attention beside its peers, or whole steps of models.

    Options that take several values take them with commas.

    \b
    Examples:
      kvjax bench --kv-heads 32,8,1 --length 2048 --torch-python ~/torch/bin/python --out results
      kvjax bench --preset acceptance
      kvjax bench smollm2 smollm2-mqa --batch 1,8 --length 1024 --codec bf16
    """
    from kvjax.bench import report

    with one_clear_error():
        timing: dict[str, Any] = {"rounds": rounds, "seed": seed}
        with typer.progressbar(length=rounds, label="rounds", file=sys.stderr) as bar:
            timing["on_round"] = bar.update
            if models:
                from kvjax.bench import decode_step

                figures = decode_step.measure(
                    {source: decode_step.read_model(source, dtype) for source in models},
                    batch=_numbers("batch", batch),
                    length=_numbers("length", length),
                    capacity=capacity,
                    codec=codec.split(","),
                    **timing,
                )
            elif preset:
                from kvjax.bench import presets

                figures = presets.run(preset, torch_python=torch_python, **timing)
            else:
                from kvjax.bench import case, decode_attention

                cases = case.grid(
                    batch=_numbers("batch", batch),
                    query_heads=query_heads,
                    kv_heads=_numbers("kv-heads", kv_heads),
                    head_dim=_numbers("head-dim", head_dim),
                    length=_numbers("length", length),
                    capacity=capacity,
                    codec=codec.split(","),
                )
                against = ("kvjax", *filter(None, peers.split(",")))
                figures = decode_attention.measure(
                    dict.fromkeys(cases, against), torch_python=torch_python, **timing
                )
        files = [] if out is None else report.write(figures, out)
    if as_json:
        print_json(figures)
    else:
        report.print_tables(figures)
        for file in files:
            typer.echo(file)


def _numbers(option: str, text: str) -> list[int]:
    """Whole numbers separated by commas."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--{option} {text!r}: whole numbers with commas between are accepted"
        ) from None
