"""One jitted step of training, over the model as a pytree."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from kvjax.cache.codecs import DTYPES
from kvjax.nn import Decoder
from kvjax.train.config import UptrainConfig
from kvjax.train.optimizer import build_optimizer, learning_rate


class TrainState(NamedTuple):
    """What a step takes over and returns: float32 masters, moments, and () int32 steps done."""

    model: Decoder
    opt_state: optax.OptState
    step: Array


def init_state(model: Decoder, config: UptrainConfig) -> TrainState:
    """The state before the first step; the model's arrays become its float32 masters."""
    # A copy even where the dtype is right: the step donates its state, the caller keeps its model.
    masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), model)
    return TrainState(masters, build_optimizer(config).init(masters), jnp.zeros((), jnp.int32))


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def train_step(
    state: TrainState, tokens: Array, teacher: Decoder | None = None, *, config: UptrainConfig
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step.

    Args:
      state: dead afterwards (donated).
      tokens: (accumulate, batch / accumulate, seq_len + 1) int32. On several devices its second
        axis is sharded, and the state and the teacher are replicated.
      teacher: a model over the same vocabulary to distil from, or None.
      config: static.

    Returns:
      The state after the step, and float32 scalars: "loss", with a teacher also "cross_entropy"
      (both in nats per token), "lr", and "grad_norm" before clipping.
    """
    loss_and_grad = jax.value_and_grad(partial(loss, config=config), has_aux=True)

    def add(total: Any, part: Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, loss_and_grad(state.model, part, teacher)), None

    # All parts hold as many tokens, so the mean over parts is the mean over the batch's tokens.
    shapes = jax.eval_shape(loss_and_grad, state.model, tokens[0], teacher)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, tokens)
    (value, terms), grads = jax.tree.map(lambda x: x / len(tokens), total)

    step = state.step + 1
    lr = jnp.float32(learning_rate(config)(step))
    updates, opt_state = build_optimizer(config).update(grads, state.opt_state, state.model)
    model = optax.apply_updates(state.model, jax.tree.map(lambda u: lr * u, updates))
    metrics = {"loss": value, **terms, "lr": lr, "grad_norm": optax.tree.norm(grads)}
    return TrainState(model, opt_state, step), metrics


def loss(
    model: Decoder, tokens: Array, teacher: Decoder | None, config: UptrainConfig
) -> tuple[Array, dict[str, Array]]:
    """Mean loss of predicting tokens (B, T + 1) from the second on; its terms, if it is mixed."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    student = cast(model, config.compute_dtype)
    logits = student.unembed(student.hidden(inputs, remat=config.remat)[0])
    cross_entropy = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))
    if teacher is None:
        return cross_entropy, {}
    teacher_logits, _ = teacher(inputs)
    divergence = distillation(logits, teacher_logits, config.temperature)
    mixed = (1 - config.distill_weight) * cross_entropy + config.distill_weight * divergence
    return mixed, {"cross_entropy": cross_entropy}


def distillation(student: Array, teacher: Array, temperature: float) -> Array:
    """Mean over positions of temperature^2 * KL(teacher || student), from logits (..., V).

    The factor keeps the size of the gradient independent of the temperature (arXiv:1503.02531).
    """
    log_student, log_teacher = (
        jax.nn.log_softmax(logits / temperature) for logits in (student, teacher)
    )
    divergence = optax.losses.kl_divergence_with_log_targets(log_student, log_teacher)
    return temperature**2 * jnp.mean(divergence)


def cast(model: Decoder, dtype: str) -> Decoder:
    """The model with all parameters in `dtype` ("f32", "bf16", "f16")."""
    return jax.tree.map(lambda x: x.astype(DTYPES[dtype]), model)
