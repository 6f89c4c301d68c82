"""``kvjax convert``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.common import (
    JsonOption,
    one_clear_error,
    print_columns,
    print_json,
    print_table,
    progress_bars,
)

if TYPE_CHECKING:
    from kvjax.convert import ConversionReport, Mha2Mla, MlaReport, TransMla


def convert(
    src: Annotated[str, typer.Argument(help="A model directory, or the id of one on the Hub.")],
    dst: Annotated[
        str | None,
        typer.Argument(help="The directory to make. With --to mla, leave it out for a report."),
    ] = None,
    to: Annotated[str, typer.Option(help="gqa, of which MQA is a case, or mla.")] = "gqa",
    kv_heads: Annotated[
        int | None, typer.Option(help="gqa: KV heads to make, a divisor of SRC's; 1 is MQA.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="gqa: mean of each group of heads; as baselines, first or random.")
    ] = "mean",
    allow_kvjax_only: Annotated[
        bool,
        typer.Option(
            "--allow-kvjax-only",
            help="gqa: write GPT-2 and GPT-NeoX too, as only kvjax loads them.",
        ),
    ] = False,
    latent_rank: Annotated[
        str | None,
        typer.Option(help="mla: numbers of a latent; without DST also several, as in 192,128."),
    ] = None,
    rope_dim: Annotated[
        int | None,
        typer.Option(
            help="mla: channels that stay rotated, of all heads' one rope key (transmla) or of "
            "each KV head's own (mha2mla)."
        ),
    ] = None,
    way: Annotated[str, typer.Option(help="mla: transmla or mha2mla.")] = "transmla",
    fold: Annotated[
        int | None,
        typer.Option(help="transmla: neighbouring frequencies that are mixed as one; default: 1."),
    ] = None,
    select: Annotated[
        str | None,
        typer.Option(
            help="mha2mla: pairs that stay rotated, 2-norm (default), high, low or uniform."
        ),
    ] = None,
    svd: Annotated[
        str | None, typer.Option(help="mha2mla: joint (default) or split latents.")
    ] = None,
    calibrate_on: Annotated[
        str | None,
        typer.Option(help="mla: text or token ids to measure inputs on; default: random ids."),
    ] = None,
    calibrate_tokens: Annotated[int, typer.Option(help="mla: tokens of it.")] = 4096,
    model_type: Annotated[
        str, typer.Option("--as", help="mla: model_type of the result.")
    ] = "kvjax_mla",
    seed: Annotated[int, typer.Option(help="Of random heads and of random token ids.")] = 0,
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
    """Convert a checkpoint: pool its KV heads into fewer (GQA, MQA), or make them of latents (MLA).

    \b
    Examples:
      kvjax convert llama-2-7b llama-2-7b-gqa --kv-heads 8 --evaluate-on test.txt
      kvjax convert smollm2 --to mla --latent-rank 192,128,64 --rope-dim 64 \\
          --calibrate-on train.txt --evaluate-on test.txt
      kvjax convert smollm2 smollm2-mla --to mla --latent-rank 128 --rope-dim 64 \\
          --calibrate-on train.txt
    """
    compared = {
        "seed": seed,
        "evaluate_on": evaluate_on if evaluate else False,
        "evaluate_tokens": evaluate_tokens,
    }
    settings = {"fold": fold, "select": select, "svd": svd}
    of_mla = {"latent_rank": latent_rank, "rope_dim": rope_dim, "calibrate_on": calibrate_on}
    with one_clear_error():
        if to == "gqa":
            _refuse({**of_mla, **settings}, "--to mla")
            options = {**compared, "method": method, "allow_kvjax_only": allow_kvjax_only}
            report = _to_gqa(src, dst, kv_heads, options)
            _show(report, as_json)
            for sentence in () if as_json else report.approximations:
                typer.echo(sentence)
        elif to == "mla":
            _refuse({"kv_heads": kv_heads}, "--to gqa")
            measured = {"calibrate_on": calibrate_on, "calibrate_tokens": calibrate_tokens}
            options = {**compared, **measured, "model_type": model_type}
            reports = _to_mla(src, dst, latent_rank, rope_dim, _way(way, settings), options)
            _show(reports[0], as_json) if len(reports) == 1 else _show_ranks(reports, as_json)
        else:
            raise ValueError(f"to: got {to!r}; accepted: gqa, mla")


def _to_gqa(
    src: str, dst: str | None, kv_heads: int | None, options: Mapping[str, Any]
) -> ConversionReport:
    from kvjax.convert import to_gqa

    if dst is None or kv_heads is None:
        raise ValueError(f"{'dst' if dst is None else 'kv_heads'}: absent; needed with --to gqa")
    with progress_bars() as on_progress:
        return to_gqa(src, dst, kv_heads, **options, on_progress=on_progress)


def _to_mla(
    src: str,
    dst: str | None,
    latent_ranks: str | None,
    rope_dim: int | None,
    way: TransMla | Mha2Mla,
    options: Mapping[str, Any],
) -> Sequence[MlaReport]:
    from kvjax.convert import mla_ranks, to_mla

    if latent_ranks is None or rope_dim is None:
        absent = "latent_rank" if latent_ranks is None else "rope_dim"
        raise ValueError(f"{absent}: absent; needed with --to mla")
    parts = latent_ranks.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(
            f"latent_rank: got {latent_ranks!r}; accepted: whole numbers, as in 192,128"
        )
    if dst is not None and len(parts) > 1:
        raise ValueError(
            f"latent_rank: got {len(parts)} of them; accepted: one for a directory to make, or "
            "several without DST, for a report"
        )
    ranks = [int(part) for part in parts]
    with progress_bars() as on_progress:
        if dst is None:
            return mla_ranks(src, ranks, rope_dim, way, **options, on_progress=on_progress)
        return [to_mla(src, dst, ranks[0], rope_dim, way, **options, on_progress=on_progress)]


def _way(name: str, settings: Mapping[str, Any]) -> TransMla | Mha2Mla:
    """The way of that name with those of the settings that were given."""
    from kvjax.convert import WAYS

    if name not in WAYS:
        raise ValueError(f"way: got {name!r}; accepted: {', '.join(WAYS)}")
    for other, way in WAYS.items():
        if other != name:
            _refuse({field.name: settings[field.name] for field in fields(way)}, f"--way {other}")
    return WAYS[name](**{key: x for key, x in settings.items() if x is not None})


def _refuse(options: Mapping[str, Any], accepted: str) -> None:
    """ValueError if one of the options was given."""
    for name, given in options.items():
        if given is not None:
            raise ValueError(f"{name}: got {given!r}; accepted with {accepted} alone")


def _show(report: ConversionReport | MlaReport, as_json: bool) -> None:
    if as_json:
        print_json(report.figures())
    else:
        print_table("Conversion", report.rows())


def _show_ranks(reports: Sequence[MlaReport], as_json: bool) -> None:
    if as_json:
        print_json([report.figures() for report in reports])
    else:
        rows = [report.columns() for report in reports]
        print_columns("Latent rank", reports[0].COLUMNS, rows)
