"""The ``kvjax`` command. Each subcommand imports what it needs when it runs, so that help and
sizing start at once.
"""

from typing import Annotated

import typer

import kvjax
from kvjax.cli.bench import bench
from kvjax.cli.calibrate import calibrate
from kvjax.cli.convert import convert
from kvjax.cli.demo import demo
from kvjax.cli.generate import WithChoices, generate
from kvjax.cli.plan import plan
from kvjax.cli.size import size
from kvjax.cli.uptrain import uptrain

app = typer.Typer(
    name="kvjax",
    help="The KV cache of language models: what it costs, how to shrink it, how fast it decodes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (size, plan, convert, uptrain, calibrate, generate, bench, demo):
    app.command(cls=WithChoices if command is generate else None)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvjax {kvjax.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options before the subcommand."""
