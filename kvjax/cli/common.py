"""What the subcommands share: errors of one line, JSON, tables and progress."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@contextmanager
def one_clear_error() -> Iterator[None]:
    """End with the message alone and status 1 where the input, or a missing extra, is at fault."""
    try:
        yield
    except (ValueError, OverflowError, OSError, ModuleNotFoundError) as error:
        typer.echo(f"kvjax: {error}", err=True)
        raise typer.Exit(1) from None


def print_json(figures: Any) -> None:
    """Print figures as JSON on standard output."""
    json.dump(figures, sys.stdout, indent=2)
    print()


def print_table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print names and values as a table with two columns."""
    print_columns(title, None, rows)


def print_columns(title: str, names: Sequence[str] | None, rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table whose rows begin with a name; `names` head the other columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=names is not None)
    table.add_column()
    for index, row in enumerate(rows):
        if index == 0:
            for position in range(len(row) - 1):
                table.add_column(names[position] if names else "", justify="right")
        table.add_row(*row)
    Console().print(table)


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A function that shows a stage of long work, what is done of it and all there is of it."""
    from rich.console import Console
    from rich.progress import Progress, TaskID

    tasks: dict[str, TaskID] = {}
    with Progress(console=Console(stderr=True)) as bars:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=done, total=total)

        yield show
