"""The training loop: batches, steps and checkpoints."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from kvjax.nn import Decoder
from kvjax.train.checkpoint import Checkpoints
from kvjax.train.config import UptrainConfig
from kvjax.train.data import batches
from kvjax.train.optimizer import build_optimizer
from kvjax.train.step import TrainState, init_state, train_step

Metrics = dict[str, float]


def data_mesh(devices: int = 1) -> Mesh:
    """The first `devices` devices, to share each batch among them."""
    found = jax.devices()
    if not 1 <= devices <= len(found):
        raise ValueError(f"devices={devices}: accepted is 1 to {len(found)}, which are here")
    return Mesh(np.array(found[:devices]), ("data",))


def train(
    model: Decoder,
    tokens: np.ndarray,
    config: UptrainConfig,
    *,
    teacher: Decoder | None = None,
    mesh: Mesh | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    save_every: int = 100,
    resume: bool = False,
    reset_optimizer: bool = False,
    on_step: Callable[[Metrics], None] | None = None,
) -> Decoder:
    """Train a model in memory.

    Args:
      model: where training starts; it is not changed.
      tokens: (n,) token ids, one stream of at least seq_len + 1.
      config: the run.
      teacher: a model over the same vocabulary to distil from, in the dtype it computes in.
      mesh: devices that share each batch (`data_mesh`); None for the first alone.
      checkpoint_dir: where checkpoints go; None for none.
      save_every: steps from one checkpoint to the next; the last step always makes one.
      resume: go on from the newest checkpoint, if there is one, exactly as if nothing had happened.
      reset_optimizer: resume with the optimizer's moments at zero.
      on_step: called after each step with its metrics: step (counted from 1), loss (nats per
        token; with a teacher the mixed loss, and cross_entropy beside it), lr, grad_norm (before
        clipping), tokens (so far) and tokens_per_second (in this step; the first compiles).

    Returns:
      The trained model, in float32.

    Raises:
      ValueError: settings that do not fit the model, the data, the devices or the checkpoint; or a
        loss that is not finite.
      FileExistsError: checkpoint_dir has checkpoints, and resume is False.
    """
    mesh = mesh or data_mesh()
    _check(model, tokens, config, teacher, mesh, save_every)
    everywhere = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec(None, "data"))
    teacher = jax.device_put(teacher, everywhere)
    run = _describe(model, tokens, config, teacher)
    data = batches(tokens, config)
    with nullcontext() if checkpoint_dir is None else Checkpoints(checkpoint_dir) as checkpoints:
        if checkpoints is None or checkpoints.step is None:
            state = jax.device_put(init_state(model, config), everywhere)
        elif resume:
            _check_same_run(checkpoints, run)
            data.set_state(checkpoints.progress()["data"])
            state = _restore(checkpoints, model, config, everywhere, reset_optimizer)
        else:
            raise FileExistsError(
                f"{checkpoints.path} exists: resume that run, or name another directory"
            )
        for step in range(int(state.step) + 1, config.total_steps + 1):
            start = time.perf_counter()
            batch = next(data).reshape(config.accumulate, -1, config.seq_len + 1)
            batch = jax.device_put(batch, split)
            state, measured = train_step(state, batch, teacher, config=config)
            metrics = {"step": step} | {name: float(x) for name, x in measured.items()}
            if not math.isfinite(metrics["loss"]):
                raise ValueError(
                    f"the loss is {metrics['loss']} in step {step}; "
                    f"try a lower learning_rate than {config.learning_rate}"
                )
            metrics["tokens"] = step * config.tokens_per_step
            metrics["tokens_per_second"] = config.tokens_per_step / (time.perf_counter() - start)
            if on_step is not None:
                on_step(metrics)
            if checkpoints is not None and (step % save_every == 0 or step == config.total_steps):
                trees = {"model": state.model, "opt_state": state.opt_state}
                checkpoints.save(step, trees, {"data": data.get_state(), "run": run})
    return state.model


def _restore(
    checkpoints: Checkpoints,
    model: Decoder,
    config: UptrainConfig,
    sharding: Sharding,
    reset_optimizer: bool,
) -> TrainState:
    """The state of the newest checkpoint."""
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(partial(init_state, config=config), model),
    )
    trained = checkpoints.restore("model", shapes.model)
    if reset_optimizer:
        opt_state = jax.device_put(build_optimizer(config).init(trained), sharding)
    elif "opt_state" in checkpoints:
        opt_state = checkpoints.restore("opt_state", shapes.opt_state)
    else:
        raise ValueError(
            f"{checkpoints.path} has no opt_state, without which the run cannot go on as it was; "
            "reset_optimizer (--reset-optimizer) goes on with moments at zero"
        )
    step = jax.device_put(jnp.asarray(checkpoints.step, jnp.int32), sharding)
    return TrainState(trained, opt_state, step)


def _describe(
    model: Decoder, tokens: np.ndarray, config: UptrainConfig, teacher: Decoder | None
) -> dict[str, Any]:
    """What decides a run's result, as JSON: a checkpoint is resumed by a run of the same only."""
    return {
        **asdict(replace(config, steps=config.total_steps, alpha=None, pretrain_tokens=None)),
        "tokens of data": len(tokens),
        "teacher": teacher is not None,
        "config.json": model.config.source,
    }


def _check_same_run(checkpoints: Checkpoints, run: dict[str, Any]) -> None:
    saved = checkpoints.progress()["run"]
    # At a constant rate a longer run starts as a shorter one does.
    may_differ = {"steps"} if run["schedule"] == "constant" else set()
    differences = [
        f"{name} is {saved.get(name)!r} there and {run[name]!r} here"
        for name in run
        if name not in may_differ and saved.get(name) != run[name]
    ]
    if run["steps"] < checkpoints.step:
        differences.append(f"it is past steps={run['steps']}")
    if differences:
        raise ValueError(f"cannot resume {checkpoints.path}: {'; '.join(differences)}")


def _check(
    model: Decoder,
    tokens: np.ndarray,
    config: UptrainConfig,
    teacher: Decoder | None,
    mesh: Mesh,
    save_every: int,
) -> None:
    if len(tokens) <= config.seq_len:
        raise ValueError(
            f"{len(tokens)} tokens of data: a sequence needs seq_len + 1 = {config.seq_len + 1}"
        )
    if teacher is not None and teacher.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"the teacher's vocabulary has {teacher.config.vocab_size} tokens, "
            f"the model's {model.config.vocab_size}: they must be the same"
        )
    if config.batch // config.accumulate % mesh.size:
        raise ValueError(
            f"batch / accumulate = {config.batch // config.accumulate} sequences "
            f"do not divide among {mesh.size} devices"
        )
    if save_every < 1:
        raise ValueError(f"save_every={save_every}: at least 1 is needed")
