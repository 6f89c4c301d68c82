"""Routers against their families' definitions, token by token, and transformers' own modules."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.nn import Groups, Router

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "routers.npz"))
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(40, 12)).astype(np.float32) * 2
CORRECTION = RNG.normal(size=12).astype(np.float32) * 0.3
# Of few values, so that experts and whole groups tie.
TIED = RNG.integers(0, 2, (40, 12)).astype(np.float32)


def route(router, logits, chosen, correction=None):
    call = jax.jit(lambda *arrays: router(arrays[0], chosen, *arrays[1:]))
    arrays = (logits,) if correction is None else (logits, correction)
    picked, weights = map(np.asarray, call(*arrays))
    assert picked.shape == weights.shape == (len(logits), chosen)
    assert (picked.dtype, weights.dtype) == (np.int32, np.float32)
    return picked, weights


def largest(values, count):
    """Indices of the largest, of equals the one that comes first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def mixtral(logits):
    """Section 2.1: the softmax over the top-k logits."""
    picked = largest(logits, 4)
    return picked, softmax(logits[picked])


def softmax_then_top_k(logits):
    """Qwen3-MoE without norm_topk_prob, and DeepSeek-V2's greedy choice with a factor of 3."""
    picked = largest(logits, 4)
    return picked, 3 * softmax(logits)[picked]


def deepseek_v2(logits):
    """Section 2.2.2: experts on at most 2 of 4 devices, those with the highest affinity."""
    scores = softmax(logits)
    devices = largest([max(scores[3 * g : 3 * g + 3]) for g in range(4)], 2)
    allowed = [scores[i] if i // 3 in devices else -1.0 for i in range(12)]
    picked = largest(allowed, 4)
    return picked, 16 * scores[picked]


def deepseek_v3(logits, correction=CORRECTION):
    """Section 2.1.2, and the sum of the two best affinities of a node."""
    scores = 1 / (1 + np.exp(-logits))
    biased = scores + correction
    nodes = largest([sum(sorted(biased[3 * g : 3 * g + 3])[-2:]) for g in range(4)], 2)
    allowed = [biased[i] if i // 3 in nodes else -np.inf for i in range(12)]
    picked = largest(allowed, 4)
    return picked, 2.5 * scores[picked] / scores[picked].sum()


GROUPED = Router(normed=False, scale=16.0, groups=Groups(4, 2))
CORRECTED = Router("sigmoid", scale=2.5, groups=Groups(4, 2, judged_by=2), corrected=True)
DEFINITIONS = {
    "mixtral": (Router(), mixtral),
    "not normed": (Router(normed=False, scale=3.0), softmax_then_top_k),
    "deepseek_v2": (GROUPED, deepseek_v2),
    "deepseek_v3": (CORRECTED, deepseek_v3),
}


@pytest.mark.parametrize(("router", "definition"), DEFINITIONS.values(), ids=DEFINITIONS)
def test_definition(router, definition):
    picked, weights = route(router, LOGITS, 4, CORRECTION if router.corrected else None)
    for token, logits in enumerate(LOGITS.astype(np.float64)):
        expected, expected_weights = definition(logits)
        assert picked[token].tolist() == expected
        np.testing.assert_allclose(weights[token], expected_weights, rtol=1e-5)


@pytest.mark.parametrize(("router", "definition"), DEFINITIONS.values(), ids=DEFINITIONS)
def test_of_equals_the_first_is_picked(router, definition):
    none = np.zeros(12, np.float32)
    picked, _ = route(router, TIED, 4, none if router.corrected else None)
    for token, logits in enumerate(TIED.astype(np.float64)):
        expected = definition(logits, none)[0] if router.corrected else definition(logits)[0]
        assert picked[token].tolist() == expected


# As the configs that scripts/make_golden_routers.py states.
MODULES = {
    "v2_greedy": Router(normed=False, scale=1.5),
    "v2_groups": GROUPED,
    "v3": CORRECTED,
    "v3_not_normed": Router(
        "sigmoid", normed=False, scale=2.5, groups=CORRECTED.groups, corrected=True
    ),
}


@pytest.mark.parametrize(("name", "router"), MODULES.items(), ids=MODULES)
def test_transformers_picks_and_weighs_alike(name, router):
    logits = GOLDEN["hidden"] @ GOLDEN["router"].T
    correction = GOLDEN["correction"] if router.corrected else None
    picked, weights = route(router, logits, 4, correction)
    for token in range(len(logits)):
        expected = dict(
            zip(GOLDEN[f"{name}_picked"][token], GOLDEN[f"{name}_weights"][token], strict=True)
        )
        assert set(picked[token]) == set(expected)
        np.testing.assert_allclose(weights[token], [expected[e] for e in picked[token]], rtol=1e-5)


def test_groups_and_corrections_matter_to_these_tokens():
    logits = GOLDEN["hidden"] @ GOLDEN["router"].T
    free, _ = route(Router(), logits, 4)
    for name in ("v2_groups", "v3"):
        assert (np.sort(GOLDEN[f"{name}_picked"]) != np.sort(free)).any()
    uncorrected, _ = route(CORRECTED, logits, 4, np.zeros(12, np.float32))
    assert (np.sort(GOLDEN["v3_picked"]) != np.sort(uncorrected)).any()


def test_a_correction_moves_the_choice_and_no_weight():
    router = Router("sigmoid", normed=False, corrected=True)
    shift = np.zeros(12, np.float32)
    shift[7] = 5.0
    picked, weights = route(router, LOGITS, 2, shift)
    assert (picked[:, 0] == 7).all()
    np.testing.assert_allclose(weights[:, 0], 1 / (1 + np.exp(-LOGITS[:, 7])), rtol=1e-5)


def test_corrections_below_zero_keep_to_the_groups():
    """Experts of other groups are out of the question, whatever the scores of those that stay."""
    shift = np.full(12, -3.0, np.float32)
    picked, _ = route(CORRECTED, LOGITS, 4, shift)
    expected = [deepseek_v3(logits, shift)[0] for logits in LOGITS.astype(np.float64)]
    assert picked.tolist() == expected


def test_scores_that_all_vanish_weigh_nothing():
    _, weights = route(Router("sigmoid"), np.full((1, 4), -200.0, np.float32), 2)
    np.testing.assert_array_equal(weights, 0)


def test_large_logits_do_not_overflow():
    for router in (Router(), Router("sigmoid")):
        _, weights = route(router, np.array([[1e4, -1e4, 9e3]], np.float32), 2)
        assert np.isfinite(weights).all()


def test_gradients_pass_through_the_weights_of_the_chosen_alone():
    def loss(logits):
        return jnp.sum(Router("sigmoid", normed=False)(logits, 3)[1])

    gradient = np.asarray(jax.jit(jax.grad(loss))(LOGITS))
    picked, _ = route(Router("sigmoid"), LOGITS, 3)
    chosen = np.zeros_like(LOGITS, bool)
    np.put_along_axis(chosen, picked, True, axis=1)
    np.testing.assert_array_equal(gradient != 0, chosen)


@pytest.mark.parametrize(
    ("router", "chosen", "message"),
    [
        (Router(), 0, "chosen: got 0; accepted: 1 to 12 experts"),
        (Router(), 13, "chosen: got 13; accepted: 1 to 12 experts"),
        (Router(groups=Groups(5, 2)), 2, "groups.count: got 5; accepted: a divisor of 12 experts"),
        (Router(groups=Groups(0, 1)), 2, "groups.count: got 0; accepted: 1 to 12"),
        (Router(groups=Groups(4, 5)), 2, "groups.kept: got 5; accepted: 1 to 4"),
        (Router(groups=Groups(4, 2, 4)), 2, "groups.judged_by: got 4; accepted: 1 to 3"),
        (Router(groups=Groups(4, 2)), 7, "chosen: got 7; accepted: 1 to 6 experts of the groups"),
    ],
    ids=str,
)
def test_a_choice_that_cannot_be_is_refused(router, chosen, message):
    with pytest.raises(ValueError, match=message):
        router.check(12, chosen)


def test_an_unknown_score_is_refused():
    with pytest.raises(ValueError, match="score='tanh': accepted are 'softmax', 'sigmoid'"):
        Router("tanh")
