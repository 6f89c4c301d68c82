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
    codec: Annotated[str, typer.Option(help="How the cache stores K and V.")] = "bf16",
    as_json: JsonOption = False,
) -> None:
    """Continue texts with a model, decoding with a cache.

    \b
    Example:
      kvjax generate smollm2 "The capital of France is" --max-new-tokens 20
    """
    with one_clear_error():
        from kvjax import engine

        texts = engine.generate_text(
            model,
            prompts,
            max_new_tokens,
            sampler=engine.Sampler(temperature, top_k, top_p),
            seed=seed,
            dtype=dtype,
            codec=codec,
        )
    if as_json:
        print_json({"prompts": prompts, "continuations": texts})
    else:
        for prompt, text in zip(prompts, texts, strict=True):
            print(prompt + text)
