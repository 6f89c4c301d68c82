from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models import init, load
from kvjax.train import UptrainConfig
from kvjax.train.step import cast, distillation, init_state, loss, train_step

GOLDEN = Path(__file__).parent / "golden"

jitted_loss = jax.jit(loss, static_argnames="config")


def config(**changes):
    return UptrainConfig(**{"steps": 8, "seq_len": 16, "batch": 8, "warmup_steps": 0} | changes)


@pytest.fixture(scope="module")
def tokens(stream):
    return stream[: 8 * 17].reshape(1, 8, 17)


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_close(got, wanted, **tolerance):
    for a, b in zip(leaves(got), leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


@pytest.mark.parametrize(
    ("run", "student", "teacher"),
    [
        pytest.param("llama_bias", "llama_bias", None, marks=pytest.mark.slow),
        ("gpt2_conv1d", "gpt2_conv1d", None),
        ("llama_bias_distilled", "llama_bias", "gpt2_conv1d"),
    ],
)
def test_steps_are_those_of_torch(golden, run, student, teacher):
    """Loss, gradient, clipping, AdamW, its mask and schedule, against torch and transformers."""
    expected = np.load(GOLDEN / f"{run}.npz")
    # As in scripts/make_golden_uptraining.py.
    settings = UptrainConfig(
        steps=8,
        seq_len=16,
        batch=4,
        learning_rate=1e-2,
        warmup_steps=3,
        weight_decay=0.3,
        clip=0.5,
        distill_weight=0.7,
        temperature=2.0,
    )
    state = init_state(load(golden / student, "f32"), settings)
    teacher = teacher and load(golden / teacher, "f32")
    for i, batch in enumerate(expected["tokens"]):
        state, metrics = train_step(state, batch[None], teacher, config=settings)
        for name in ("loss", "grad_norm", "lr"):
            np.testing.assert_allclose(
                metrics[name], expected[name][i], rtol=1e-4, err_msg=f"{name} of step {i + 1}"
            )


def test_loss_is_the_mean_negative_log_likelihood(tiny, tokens):
    value, terms = jitted_loss(tiny, tokens[0], None, config=config())
    logits = np.asarray(jax.jit(tiny)(tokens[0, :, :-1])[0], np.float64)
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    chosen = np.take_along_axis(exp / exp.sum(-1, keepdims=True), tokens[0, :, 1:, None], -1)
    np.testing.assert_allclose(value, -np.log(chosen).mean(), rtol=1e-6)
    assert terms == {}


@pytest.mark.parametrize("accumulate", [4])
def test_accumulation_equals_the_big_batch(tiny, tokens, accumulate):
    whole, parts = config(), config(accumulate=accumulate)
    state, metrics = train_step(init_state(tiny, whole), tokens, config=whole)
    split = tokens.reshape(accumulate, -1, 17)
    split_state, split_metrics = train_step(init_state(tiny, parts), split, config=parts)
    np.testing.assert_allclose(split_metrics["loss"], metrics["loss"], rtol=1e-6)
    np.testing.assert_allclose(split_metrics["grad_norm"], metrics["grad_norm"], rtol=1e-5)
    # Not the parameters: Adam's first step makes signs of gradients, those near zero included.
    assert_close(split_state.opt_state, state.opt_state, rtol=1e-4, atol=1e-8)


def test_distillation_pulls_nowhere_where_the_student_is_the_teacher(tiny, tiny_config, tokens):
    settings = config(distill_weight=1.0, temperature=3.0)
    grad = jax.jit(jax.grad(partial(loss, config=settings), has_aux=True))
    at_teacher, terms = grad(tiny, tokens[0], tiny)
    assert max(np.abs(leaf).max() for leaf in leaves(at_teacher)) < 1e-7
    assert terms["cross_entropy"] > 4
    elsewhere, _ = grad(tiny, tokens[0], init(tiny_config, seed=1))
    assert max(np.abs(leaf).max() for leaf in leaves(elsewhere)) > 1e-3


def test_temperature_keeps_the_size_of_the_distillation_gradient():
    """For small logits T^2 KL(teacher || student) tends to half their squared distance, over V."""
    rng = np.random.default_rng(0)
    student, teacher = (0.01 * rng.standard_normal((2, 5, 61)) for _ in range(2))
    student, teacher = (x - x.mean(-1, keepdims=True) for x in (student, teacher))
    expected = np.mean(np.sum((student - teacher) ** 2, -1)) / (2 * 61)
    for temperature in (1.0, 5.0):
        got = distillation(jnp.asarray(student), jnp.asarray(teacher), temperature)
        np.testing.assert_allclose(got, expected, rtol=0.02)


def test_bf16_compute_keeps_masters_and_moments_in_f32(tiny, tokens):
    settings = config(compute_dtype="bf16", learning_rate=1e-5)
    stored = cast(tiny, "bf16")
    state, _ = train_step(init_state(stored, settings), tokens, config=settings)
    assert {leaf.dtype.name for leaf in leaves(state.model)} == {"float32"}
    assert {leaf.dtype.name for leaf in leaves(state.opt_state)} == {"float32", "int32"}
    # A step of 1e-5 is far below the spacing of bf16 at most weights, and must not be lost.
    assert_close(state.model, stored, atol=3e-5, rtol=0)
    for new, old in zip(leaves(state.model), leaves(stored), strict=True):
        assert np.mean(new != old) > 0.5
    # Op by op: under jit XLA on CPU may compute more precisely than asked.
    rounded, _ = loss(cast(stored, "f32"), tokens[0], None, settings)
    exact, _ = jitted_loss(cast(stored, "f32"), tokens[0], None, config=config())
    assert 0 < abs(rounded - exact) < 0.02


def test_remat_has_the_same_gradients_and_stores_less(tiny_config):
    deep = init({**tiny_config, "num_hidden_layers": 3}, seed=0)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (8, 65)))

    def compiled(remat):
        grad = jax.grad(partial(loss, config=config(remat=remat)), has_aux=True)
        return jax.jit(grad, static_argnums=2).lower(deep, tokens, None).compile()

    plain, remat = compiled(False), compiled(True)
    assert_close(remat(deep, tokens), plain(deep, tokens), rtol=1e-5, atol=1e-7)
    temporaries = [step.memory_analysis().temp_size_in_bytes for step in (plain, remat)]
    assert temporaries[1] < 0.7 * temporaries[0]


def test_the_state_is_donated_and_the_model_is_not(tiny, tokens):
    state = init_state(tiny, config())
    nbytes = sum(leaf.nbytes for leaf in leaves(state))
    lowered = train_step.lower(state, tokens, config=config())
    assert lowered.compile().memory_analysis().alias_size_in_bytes == nbytes
    train_step(state, tokens, config=config())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.model))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(tiny))
