"""``kvjax demo``."""

from dataclasses import asdict
from typing import Annotated

import typer

from kvjax.cli.common import JsonOption, one_clear_error, print_json


def demo(
    model: Annotated[str, typer.Option(help="kvjax's own small model (kjv), or smollm2.")] = "kjv",
    out: Annotated[str, typer.Option(help="Directory for the report.")] = "demo_report",
    as_json: JsonOption = False,
) -> None:
    """Size, convert, uptrain, generate with and measure a model, and write a report.

    \b
    Example:
      kvjax demo --model smollm2
    """
    from pathlib import Path

    with one_clear_error():
        from kvjax import demo as demos

        def say(line: str) -> None:
            typer.echo(line, err=True)

        report = demos.run_demo(model, Path(out), say)
        path = demos.write_report(report, Path(out))
    if as_json:
        print_json(asdict(report))
    else:
        print(path.read_text())
        print(f"Written to {path}")
