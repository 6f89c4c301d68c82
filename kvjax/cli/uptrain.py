"""``kvjax uptrain``."""

from dataclasses import asdict
from typing import Annotated

import typer

from kvjax.cli.common import JsonOption, one_clear_error, print_json, print_table


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
