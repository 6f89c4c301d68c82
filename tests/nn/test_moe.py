"""The mixture of experts against a float64 loop over all experts, and transformers' modules."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.nn import ClampedSwiglu, Gated, Groups, MlpConfig, MoeConfig, Router
from kvjax.nn.moe import Moe

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "routers.npz"))
X = np.random.default_rng(0).normal(size=(2, 7, 4)).astype(np.float32)
SHARED = MlpConfig(width=3)
CLAMPED = ClampedSwiglu(alpha=0.5, limit=0.7)
GROUPS = {"experts": 6, "chosen": 3}
GROUPED = Router(normed=False, scale=4.0, groups=Groups(3, 2))
CORRECTED = Router("sigmoid", scale=2.5, groups=Groups(3, 2, judged_by=2), corrected=True)


def build(dtype=jnp.float32, **settings) -> Moe:
    """A module whose parameters are all of order 1."""
    settings = {"width": 6, "experts": 5, "chosen": 2} | settings
    moe = MoeConfig(**settings).build(4, dtype, nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(1), 16))
    return jax.tree.map(
        lambda leaf: jax.random.normal(next(keys), leaf.shape).astype(leaf.dtype), moe
    )


@jax.jit
def run(moe, x):
    return moe(x)


def array(parameter) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


def affine(x: np.ndarray, layer, expert: int | None = None) -> np.ndarray:
    kernel = array(layer.kernel)
    bias = np.zeros(kernel.shape[:-2] + kernel.shape[-1:])
    if layer.bias is not None:
        bias = array(layer.bias)
    return x @ kernel + bias if expert is None else x @ kernel[expert] + bias[expert]


def silu(x: np.ndarray, alpha: float = 1.0) -> np.ndarray:
    return x / (1 + np.exp(-alpha * x))


def gated(gate: np.ndarray, up: np.ndarray, how) -> np.ndarray:
    if isinstance(how, Gated):
        return {"silu": silu, "relu": lambda x: np.maximum(x, 0)}[how.activation](gate) * up
    gate, up = np.minimum(gate, how.limit), np.clip(up, -how.limit, how.limit)
    return silu(gate, how.alpha) * (up + 1)


def weights_of_all(moe: Moe, x: np.ndarray) -> np.ndarray:
    """(..., E), 0 where an expert is not chosen; test_routers.py checks the routers themselves."""
    c = moe.config
    logits = affine(x, moe.router).reshape(-1, c.experts).astype(np.float32)
    correction = moe.correction[...] if c.router.corrected else None
    picked, weights = jax.jit(lambda *arrays: c.router(arrays[0], c.chosen, correction))(logits)
    full = np.zeros(logits.shape)
    np.put_along_axis(full, np.asarray(picked), np.asarray(weights, np.float64), axis=1)
    return full.reshape(*x.shape[:-1], c.experts)


def expected_output(moe: Moe, x: np.ndarray) -> np.ndarray:
    """Every expert for every token, times a weight that is mostly 0."""
    x = x.astype(np.float64)
    weights, out = weights_of_all(moe, x), np.zeros_like(x)
    for expert in range(moe.config.experts):
        gate, up = np.split(affine(x, moe.experts.gate_up, expert), 2, axis=-1)
        inner = gated(gate, up, moe.config.gate)
        out += weights[..., expert, None] * affine(inner, moe.experts.down, expert)
    if moe.config.shared is not None:
        shared = moe.shared
        out += affine(silu(affine(x, shared.gate)) * affine(x, shared.up), shared.down)
    return out


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bias": True},
        {"chosen": 1},
        {"chosen": 5, "bias": True},
        {"experts": 1, "chosen": 1},
        {"gate": ClampedSwiglu(), "bias": True},
        {"gate": CLAMPED, "bias": True},
        {"gate": Gated("relu"), "router": Router(normed=False, scale=3.0)},
        {"shared": SHARED},
        {"shared": MlpConfig(width=3, bias=True), "router": GROUPED, **GROUPS},
        {"shared": SHARED, "router": CORRECTED, **GROUPS},
    ],
    ids=str,
)
def test_output(settings):
    moe = build(**settings)
    np.testing.assert_allclose(run(moe, X), expected_output(moe, X), rtol=1e-4, atol=1e-4)


DEEPSEEK = {
    "v2_greedy": Router(normed=False, scale=1.5),
    "v2_groups": Router(normed=False, scale=16.0, groups=Groups(4, 2)),
    "v3": Router("sigmoid", scale=2.5, groups=Groups(4, 2, judged_by=2), corrected=True),
}


@pytest.mark.parametrize(("name", "router"), DEEPSEEK.items(), ids=DEEPSEEK)
def test_transformers_agrees(name, router):
    config = MoeConfig(5, 12, 4, router, shared=MlpConfig(width=10))
    moe = config.build(8, jnp.float32, nnx.Rngs(0))
    moe.router.kernel[...] = GOLDEN["router"].T
    moe.experts.gate_up.kernel[...] = GOLDEN["gate_up"].swapaxes(1, 2)
    moe.experts.down.kernel[...] = GOLDEN["down"].swapaxes(1, 2)
    for part in ("gate", "up", "down"):
        getattr(moe.shared, part).kernel[...] = GOLDEN[f"shared_{part}"].T
    if router.corrected:
        moe.correction[...] = GOLDEN["correction"]
    out = run(moe, GOLDEN["hidden"][None])[0]
    np.testing.assert_allclose(out, GOLDEN[f"{name}_out"], rtol=1e-4, atol=1e-4)


def test_experts_that_no_token_picks_are_idle():
    moe = build(bias=True)
    moe.router.bias[...] = jnp.array([0.0, -1e3, 0, -1e3, 0])
    before = run(moe, X)
    for layer in (moe.experts.gate_up, moe.experts.down):
        layer.kernel[...] = layer.kernel[...].at[jnp.array([1, 3])].set(1e6)
    np.testing.assert_array_equal(run(moe, X), before)


def test_a_token_takes_no_notice_of_others():
    moe = build(bias=True)
    np.testing.assert_allclose(run(moe, X)[1:, 3:4], run(moe, X[1:, 3:4]), atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_dtype_is_kept(dtype):
    """With one expert for all, so that rounding cannot change which ones are picked."""
    moe = build(dtype, experts=2, chosen=2, bias=True, shared=SHARED)
    out = run(moe, jnp.asarray(X, dtype))
    assert out.dtype == dtype
    expected = expected_output(moe, np.asarray(jnp.asarray(X, dtype), np.float32))
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=0.1, atol=0.15)


def test_logits_are_not_rounded_to_the_dtype_of_the_tokens():
    """Two experts whose logits differ by less than a step of bf16, which is 2 near 256."""
    moe = build(jnp.bfloat16, experts=2, chosen=1)
    moe.router.kernel[...] = jnp.array([[256, 256], [0, 0.5], [0, 0], [0, 0]], jnp.bfloat16)
    x = jnp.array([[[1, 1, 1, 1], [1, -1, 1, 1]]], jnp.bfloat16)
    picked = np.argmax(weights_of_all(moe, np.asarray(x, np.float32)), axis=-1)
    assert picked.tolist() == [[1, 0]]
    expected = expected_output(moe, np.asarray(x, np.float32))
    np.testing.assert_allclose(np.asarray(run(moe, x), np.float64), expected, rtol=0.1, atol=0.15)


def test_the_correction_is_in_float32_whatever_the_dtype():
    moe = build(jnp.bfloat16, router=CORRECTED, **GROUPS)
    assert {leaf.dtype for leaf in jax.tree.leaves(moe.experts)} == {jnp.dtype(jnp.bfloat16)}
    assert moe.correction.dtype == jnp.float32
    assert run(moe, jnp.asarray(X, jnp.bfloat16)).dtype == jnp.bfloat16


def test_gradients_reach_every_parameter_but_the_correction():
    loss = jax.jit(jax.grad(lambda moe: jnp.sum(moe(jnp.asarray(X)) ** 2)))
    moe = build(bias=True, shared=SHARED, router=CORRECTED, **GROUPS)
    gradients = jax.tree_util.tree_flatten_with_path(loss(moe))[0]
    zero = [jax.tree_util.keystr(keys) for keys, leaf in gradients if not np.abs(leaf).max() > 0]
    assert zero == [".correction.value"]


def test_what_cannot_be_routed_is_refused():
    with pytest.raises(ValueError, match="chosen: got 6; accepted: 1 to 5 experts"):
        MoeConfig(width=6, experts=5, chosen=6)
    with pytest.raises(ValueError, match=r"groups.count: got 3; accepted: a divisor of 5 experts"):
        MoeConfig(width=6, experts=5, chosen=2, router=GROUPED)
