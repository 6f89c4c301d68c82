"""The ``kvjax`` command. Each subcommand imports what it needs when it runs, so that help and
sizing start at once.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer

import kvjax

app = typer.Typer(
    name="kvjax",
    help="The KV cache of language models: what it costs, how to shrink it, how fast it decodes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@contextmanager
def one_clear_error() -> Iterator[None]:
    """End with the message alone and status 1 where the input, or a missing extra, is at fault."""
    try:
        yield
    except (ValueError, OSError, ModuleNotFoundError) as error:
        typer.echo(f"kvjax: {error}", err=True)
        raise typer.Exit(1) from None


def print_json(figures: dict[str, Any]) -> None:
    """Print figures as JSON on standard output."""
    json.dump(figures, sys.stdout, indent=2)
    print()


def print_table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print names and values as a table with two columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
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


@app.command()
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


@app.command()
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


@app.command()
def uptrain(
    src: Annotated[str, typer.Argument(help="A model directory, such as `kvjax convert` writes.")],
    dst: Annotated[str, typer.Argument(help="The directory to make.")],
    data: Annotated[str, typer.Option(help="UTF-8 text, or token ids in a .npy or .bin file.")],
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; or give --alpha.")] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Length as a share of --pretrain-tokens, such as 0.05.")
    ] = None,
    pretrain_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the model was pre-trained on.")
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens predicted in each sequence.")] = 512,
    batch: Annotated[int, typer.Option(help="Sequences of one step.")] = 8,
    accumulate: Annotated[
        int, typer.Option(help="Parts that a batch is computed in, one after the other.")
    ] = 1,
    learning_rate: Annotated[float, typer.Option(help="The peak.")] = 3e-4,
    schedule: Annotated[
        str, typer.Option(help="After the warm-up: constant, or cosine to a tenth of the peak.")
    ] = "cosine",
    warmup_steps: Annotated[int, typer.Option(help="Steps up to the peak.")] = 10,
    weight_decay: Annotated[float, typer.Option(help="Of projection matrices.")] = 0.1,
    clip: Annotated[float, typer.Option(help="The largest norm of the gradient.")] = 1.0,
    compute_dtype: Annotated[
        str, typer.Option(help="f32 or bf16; parameters and moments are kept in f32.")
    ] = "f32",
    remat: Annotated[
        bool, typer.Option("--remat", help="Compute activations twice to store fewer.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the order of the sequences.")] = 0,
    teacher: Annotated[
        str | None, typer.Option(help="A model directory to distil from, such as SRC's source.")
    ] = None,
    distill_weight: Annotated[float, typer.Option(help="Share of the teacher in the loss.")] = 0.5,
    temperature: Annotated[float, typer.Option(help="Of the distillation.")] = 1.0,
    held_out: Annotated[
        str | None, typer.Option(help="Text or token ids to evaluate on before and after.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    work_dir: Annotated[
        str | None, typer.Option(help="For checkpoints and metrics.jsonl; default: DST.train.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    reset_optimizer: Annotated[
        bool, typer.Option("--reset-optimizer", help="Resume with the moments at zero.")
    ] = False,
    devices: Annotated[int, typer.Option(help="Devices that share each batch.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Train a converted model further on text, to recover what the conversion lost.

    \b
    Example:
      kvjax uptrain smollm2-mqa smollm2-mqa-uptrained --data train.txt --held-out test.txt \\
          --steps 500 --teacher smollm2
    """
    with one_clear_error():
        from kvjax import train

        config = train.UptrainConfig(
            steps=steps,
            alpha=alpha,
            pretrain_tokens=pretrain_tokens,
            seq_len=seq_len,
            batch=batch,
            accumulate=accumulate,
            learning_rate=learning_rate,
            schedule=schedule,
            warmup_steps=warmup_steps,
            weight_decay=weight_decay,
            clip=clip,
            compute_dtype=compute_dtype,
            remat=remat,
            seed=seed,
            distill_weight=distill_weight,
            temperature=temperature,
        )
        with train.ProgressBar(config.total_steps) as bar:
            report = train.uptrain(
                src,
                dst,
                data,
                config,
                held_out_path=held_out,
                teacher_dir=teacher,
                work_dir=work_dir,
                save_every=save_every,
                resume=resume,
                reset_optimizer=reset_optimizer,
                mesh=train.data_mesh(devices),
                on_step=bar,
            )
    figures = asdict(report)
    if as_json:
        print_json(figures)
    else:
        shown = {
            name: f"{x:.4f}" if isinstance(x, float) else str(x) for name, x in figures.items()
        }
        print_table("Uptraining", shown.items())


@app.command()
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


@app.command()
def bench(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Model directories or config.json files; none: attention alone."),
    ] = None,
    batch: Annotated[str, typer.Option(help="B: rows, one number or several.")] = "4",
    length: Annotated[str, typer.Option(help="Live tokens a row.")] = "2048",
    capacity: Annotated[
        int | None, typer.Option(help="Slots a row; default: as many as live tokens.")
    ] = None,
    codec: Annotated[str, typer.Option(help="How K and V are stored.")] = "f32,bf16",
    query_heads: Annotated[int, typer.Option(help="N, of attention alone.")] = 32,
    kv_heads: Annotated[str, typer.Option(help="K, of attention alone.")] = "32,8,1",
    head_dim: Annotated[str, typer.Option(help="H, of attention alone.")] = "128",
    peers: Annotated[
        str, typer.Option(help="Whom to compare attention with; '' for nobody.")
    ] = "jax.nn,flax.nnx,torch",
    torch_python: Annotated[
        str | None, typer.Option(help="An interpreter that has torch; default: this one.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="A named run of attention in place of shapes and peers: acceptance."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Weights of the models: f32, bf16; default: as stored.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Samples of each contender, at least 3.")] = 7,
    seed: Annotated[int, typer.Option(help="Of the numbers and of the order of turns.")] = 0,
    out: Annotated[
        str | None, typer.Option(help="A directory for JSON, Markdown and plots.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure decode: attention beside its peers, or whole steps of models.

    Options that take several values take them with commas.

    \b
    Examples:
      kvjax bench --kv-heads 32,8,1 --length 2048 --torch-python ~/torch/bin/python --out results
      kvjax bench --preset acceptance
      kvjax bench smollm2 smollm2-mqa --batch 1,8 --length 1024 --codec bf16
    """
    from kvjax.bench import report

    with one_clear_error():
        timing: dict[str, Any] = {"rounds": rounds, "seed": seed}
        with typer.progressbar(length=rounds, label="rounds", file=sys.stderr) as bar:
            timing["on_round"] = bar.update
            if models:
                from kvjax.bench import decode_step

                figures = decode_step.measure(
                    {source: decode_step.read_model(source, dtype) for source in models},
                    batch=_numbers("batch", batch),
                    length=_numbers("length", length),
                    capacity=capacity,
                    codec=codec.split(","),
                    **timing,
                )
            elif preset:
                from kvjax.bench import presets

                figures = presets.run(preset, torch_python=torch_python, **timing)
            else:
                from kvjax.bench import case, decode_attention

                cases = case.grid(
                    batch=_numbers("batch", batch),
                    query_heads=query_heads,
                    kv_heads=_numbers("kv-heads", kv_heads),
                    head_dim=_numbers("head-dim", head_dim),
                    length=_numbers("length", length),
                    capacity=capacity,
                    codec=codec.split(","),
                )
                against = ("kvjax", *filter(None, peers.split(",")))
                figures = decode_attention.measure(
                    dict.fromkeys(cases, against), torch_python=torch_python, **timing
                )
        files = [] if out is None else report.write(figures, out)
    if as_json:
        print_json(figures)
    else:
        report.print_tables(figures)
        for file in files:
            typer.echo(file)


def _numbers(option: str, text: str) -> list[int]:
    """Whole numbers separated by commas."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--{option} {text!r}: whole numbers with commas between are accepted"
        ) from None


@app.command()
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
