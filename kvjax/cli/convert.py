"""``kvjax convert``."""

from typing import Annotated

import typer

from kvjax.cli.common import (
    JsonOption,
    one_clear_error,
    print_json,
    print_table,
    progress_bars,
)


def convert(
    src: Annotated[str, typer.Argument(help="A model directory, or the id of one on the Hub.")],
    dst: Annotated[str, typer.Argument(help="The directory to make.")],
    kv_heads: Annotated[int, typer.Option(help="KV heads to make, a divisor of SRC's; 1 is MQA.")],
    method: Annotated[
        str, typer.Option(help="mean of each group of heads; or, as baselines, first or random.")
    ] = "mean",
    seed: Annotated[int, typer.Option(help="Of random heads and of random token ids.")] = 0,
    allow_kvjax_only: Annotated[
        bool,
        typer.Option(
            "--allow-kvjax-only", help="Write GPT-2 and GPT-NeoX too, as only kvjax loads them."
        ),
    ] = False,
    evaluate: Annotated[
        bool,
        typer.Option("--evaluate/--no-evaluate", help="Compare the result's logits with SRC's."),
    ] = True,
    evaluate_on: Annotated[
        str | None, typer.Option(help="Text or token ids for that; default: random token ids.")
    ] = None,
    evaluate_tokens: Annotated[int, typer.Option(help="Tokens of it that are compared.")] = 512,
    as_json: JsonOption = False,
) -> None:
    """Pool the KV heads of a checkpoint into fewer: MHA to GQA, or to MQA.

    \b
    Example:
      kvjax convert llama-2-7b llama-2-7b-gqa --kv-heads 8 --evaluate-on test.txt
    """
    with one_clear_error():
        from kvjax.convert import to_gqa

        with progress_bars() as on_progress:
            report = to_gqa(
                src,
                dst,
                kv_heads,
                method,
                seed=seed,
                allow_kvjax_only=allow_kvjax_only,
                evaluate_on=evaluate_on if evaluate else False,
                evaluate_tokens=evaluate_tokens,
                on_progress=on_progress,
            )
    if as_json:
        print_json(report.figures())
    else:
        print_table("Conversion", report.rows())
        for sentence in report.approximations:
            typer.echo(sentence)
