"""``kvjax size``."""

from typing import Annotated

import typer

from kvjax.cli.common import JsonOption, one_clear_error, print_json, print_table


def size(
    config: Annotated[str, typer.Argument(help="A config.json, or a directory that has one.")],
    tokens: Annotated[int, typer.Option(help="Tokens each sequence holds.")] = 4096,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    codec: Annotated[
        str, typer.Option(help="How K and V are stored: f32, bf16, fp8, ...")
    ] = "bf16",
    chip: Annotated[
        str | None, typer.Option(help="Add the decode floor on this chip: H100-SXM, H200, ...")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a model's KV cache costs, from its config.json.

    \b
    Example:
      kvjax size config.json --tokens 8192 --batch 16 --chip H200
    """
    from kvjax import sizing
    from kvjax.sizing import text

    with one_clear_error():
        figures = sizing.report(sizing.load(config), tokens, batch, codec, chip)
    if as_json:
        print_json(figures)
    else:
        print_table(text.title(figures), text.rows(figures))
