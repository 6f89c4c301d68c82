"""``kvjax generate``."""

from typing import Annotated

import typer

from kvjax.cli.common import JsonOption, one_clear_error, print_json


def generate(
    model: Annotated[str, typer.Argument(help="A model directory, or a Hub id.")],
    prompts: Annotated[list[str], typer.Argument(help="Texts to continue, as one batch.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add to each.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Choose among the k likeliest.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Choose among the likeliest that reach p together.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random choices.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="f32, bf16 or f16; default: as stored.")] = None,
    layout: Annotated[
        str, typer.Option(help="Where the cache keeps tokens: auto, dense, paged:16, sinks:4+508.")
    ] = "auto",
    codec: Annotated[
        str, typer.Option(help="How it stores K and V: bf16, f32, f16, fp8, int8, int4, ...")
    ] = "bf16",
    as_json: JsonOption = False,
) -> None:
    """Continue texts with a model, decoding with a cache.

    \b
    Examples:
      kvjax generate smollm2 "The capital of France is" --max-new-tokens 20
      kvjax generate smollm2 "Once upon a time" --layout sinks:4+252 --codec int8
    """
    with one_clear_error():
        from kvjax import engine
        from kvjax.cache.spelling import read_layout

        found = engine.generate_text(
            model,
            prompts,
            max_new_tokens,
            sampler=engine.Sampler(temperature, top_k, top_p),
            seed=seed,
            dtype=dtype,
            layout=read_layout(layout),
            codec=codec,
        )
    if as_json:
        bytes_of = {"cache_bytes": found.cache_bytes, "dense_bf16_bytes": found.dense_bytes}
        print_json({"prompts": prompts, "continuations": found.texts, **bytes_of})
        return
    for prompt, text in zip(prompts, found.texts, strict=True):
        print(prompt + text)
    typer.echo(
        f"cache: {found.cache_bytes:,} B, {found.cache_bytes / found.dense_bytes:.1%} of "
        f"{found.dense_bytes:,} B in a dense bf16 one",
        err=True,
    )
