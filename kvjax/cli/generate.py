"""``kvjax generate``."""

from typing import Annotated, Any

import typer
import typer.core

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
        str, typer.Option(help="Where the cache keeps tokens: auto, dense, paged:16; see below.")
    ] = "auto",
    codec: Annotated[
        str, typer.Option(help="How it stores K and V: bf16, fp8, int4, kivi2; see below.")
    ] = "bf16",
    evict: Annotated[
        str | None,
        typer.Option(help="What to keep of the prompt, and each so many tokens: snapkv:256/64."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue texts with a model, decoding with a cache, and say what the cache saved.

    \b
    Examples:
      make smollm2
      kvjax generate demo_report/models/smollm2 "The capital of France is" --max-new-tokens 20
      kvjax generate demo_report/models/smollm2 "Once upon a time" --layout paged:16 --codec int8
      kvjax generate demo_report/models/smollm2 "$(cat text.txt)" --evict snapkv:256/64
    """
    with one_clear_error():
        from kvjax import engine
        from kvjax.cache.spelling import read_layout
        from kvjax.engine.spelling import read_eviction

        found = engine.generate_text(
            model,
            prompts,
            max_new_tokens,
            sampler=engine.Sampler(temperature, top_k, top_p),
            seed=seed,
            dtype=dtype,
            layout=read_layout(layout),
            codec=codec,
            eviction=None if evict is None else read_eviction(evict),
        )
    if found.scales is not None:
        typer.echo(f"scales of the cache: {found.scales}", err=True)
    if as_json:
        bytes_of = {
            "cache_bytes": found.cache_bytes,
            "peak_cache_bytes": found.peak_bytes,
            "dense_bf16_bytes": found.dense_bytes,
            "saved_bytes": found.dense_bytes - found.cache_bytes,
        }
        print_json({"prompts": prompts, "continuations": found.texts, **bytes_of})
        return
    for prompt, text in zip(prompts, found.texts, strict=True):
        print(prompt + text)
    typer.echo(_bytes_saved(found.cache_bytes, found.peak_bytes, found.dense_bytes), err=True)


def _bytes_saved(cache: int, peak: int, dense: int) -> str:
    """What a cache took, and how that compares with a dense bf16 one."""
    of_dense = f"a dense bf16 one of {dense:,} B"
    if cache == dense:
        compared = f"as much as {of_dense}"
    else:
        share = f"{abs(dense - cache):,} B ({abs(dense - cache) / dense:.1%})"
        compared = f"{share} {'less' if cache < dense else 'more'} than {of_dense}"
    if cache > dense:
        compared += ", which is smaller for so few tokens or in so few bits"
    at_most = f"; at most {peak:,} B" if peak != cache else ""
    return f"cache: {cache:,} B, {compared}{at_most}"


class WithChoices(typer.core.TyperCommand):
    """A command whose help ends with the caches that there are.

    Looked up when help is asked for, since the library takes a while to import.
    """

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from kvjax.cache.spelling import CODECS, SPELLINGS
        from kvjax.engine import spelling
        from kvjax.evict import POLICIES

        choices = {
            "--layout": ", ".join(SPELLINGS),
            "--codec": f"{', '.join(CODECS)}; kivi2 and kivi4 only where no token is dropped "
            "alone: dense, paged:32, and without --evict",
            "--evict": f"{' or '.join(spelling.SPELLINGS)}; policies: {', '.join(POLICIES)}",
        }
        with formatter.section("Choices"):
            formatter.write_dl(list(choices.items()))
