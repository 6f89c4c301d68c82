"""``kvjax calibrate``."""

from typing import Annotated

import typer

from kvjax.cli.common import (
    JsonOption,
    one_clear_error,
    print_columns,
    print_json,
    print_table,
    progress_bars,
)


def calibrate(
    model: Annotated[str, typer.Argument(help="A model directory, or the id of one on the Hub.")],
    text: Annotated[
        str | None, typer.Option(help="Text, or token ids in a .npy or .bin file, to calibrate on.")
    ] = None,
    random_tokens: Annotated[
        int | None, typer.Option(help="So many random tokens instead of a text.")
    ] = None,
    codec: Annotated[
        str, typer.Option(help="fp8_e4m3_head (a scale a KV head), fp8_e4m3 or fp8_e5m2.")
    ] = "fp8_e4m3_head",
    percentile: Annotated[
        float | None, typer.Option(help="Of the tokens' amax, such as 99.9; default: the largest.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to read, at most.")] = 16384,
    length: Annotated[int, typer.Option(help="Tokens of a row that see each other.")] = 512,
    batch: Annotated[int, typer.Option(help="Rows that are read together.")] = 8,
    report_on: Annotated[
        str | None, typer.Option(help="Text to measure on; default: the end of the text.")
    ] = None,
    report_tokens: Annotated[
        int, typer.Option(help="Tokens of it; in rows of 256, decoded one by one.")
    ] = 1024,
    seed: Annotated[int, typer.Option(help="Of random tokens.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="f32, bf16 or f16; default: as stored.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Choose the scales of an fp8 cache, write them beside the model, and say what they change.

    \b
    Examples:
      make smollm2
      kvjax calibrate demo_report/models/smollm2 --text train.txt --percentile 99.9
      kvjax calibrate demo_report/models/smollm2 --random-tokens 8192 --codec fp8_e4m3
    """
    with one_clear_error():
        if (text is None) == (random_tokens is None):
            given = "neither" if text is None else "both"
            raise ValueError(f"got {given}; accepted: --text FILE or --random-tokens N")
        from kvjax.engine.calibrate_text import calibrate_model

        with progress_bars() as on_progress:
            done = calibrate_model(
                model,
                text,
                codec=codec,
                percentile=percentile,
                tokens=tokens if random_tokens is None else random_tokens,
                length=length,
                batch=batch,
                report_on=report_on,
                report_tokens=report_tokens,
                seed=seed,
                dtype=dtype,
                on_progress=on_progress,
            )
    if as_json:
        print_json(done.as_dict())
        return
    from kvjax.engine.codec_error import COLUMNS

    print_columns("Relative error by layer, of exact inputs", COLUMNS, done.error.rows())
    print_table("Calibration", done.rows())
