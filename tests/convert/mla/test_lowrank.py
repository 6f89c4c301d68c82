"""Factors of low rank."""

import numpy as np
import pytest

from kvjax.convert.mla.lowrank import balanced, joint, relative_error, split

D = 128


def weights(keys=96, values=64, width=D):
    """Keys that are large and of full rank, and values that are small and of rank 24."""
    rng = np.random.default_rng(0)
    large = 30 * rng.normal(size=(keys, width))
    return large, rng.normal(size=(values, 24)) @ rng.normal(size=(24, width)) / 24**0.5


def errors(factors, keys, values, moment):
    return [
        relative_error(weight, up @ factors.down, moment)
        for weight, up in ((keys, factors.key_up), (values, factors.value_up))
    ]


def test_balance_saves_the_smaller_of_the_two():
    keys, values = weights(192, 96, 384)
    moment = np.eye(384)
    unbalanced = errors(joint(keys, values, 64), keys, values, moment)
    found = errors(balanced(keys, values, 64, moment), keys, values, moment)
    assert unbalanced[1] > 0.9
    assert found[1] < 0.2
    assert found[0] < 1.2 * unbalanced[0]


def test_components_are_those_of_the_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, D)) * np.geomspace(1, 1e-3, D)
    moment = x.T @ x / len(x)
    keys, values = weights()
    factors = balanced(keys, values, 24, moment)
    found = errors(factors, keys, values, moment)
    assert max(found) < 0.6 * max(errors(joint(keys, values, 24), keys, values, moment))
    # As measured on the data themselves.
    error, whole = (keys - factors.key_up @ factors.down) @ x.T, keys @ x.T
    assert found[0] == pytest.approx(np.linalg.norm(error) / np.linalg.norm(whole), rel=1e-9)


@pytest.mark.parametrize("factor", [joint, split])
def test_full_rank_is_exact(factor):
    keys, values = weights()
    found = factor(keys, values, 160)
    assert max(errors(found, keys, values, np.eye(D))) < 1e-12


def test_the_best_approximation_of_both_and_of_either():
    keys, values = weights()
    singular = np.linalg.svd(np.concatenate([keys, values]), compute_uv=False)
    found = joint(keys, values, 40)
    off = [keys - found.key_up @ found.down, values - found.value_up @ found.down]
    assert np.linalg.norm(np.concatenate(off)) == pytest.approx(np.linalg.norm(singular[40:]))
    found = split(keys, values, 40)
    for weight, up in ((keys, found.key_up), (values, found.value_up)):
        singular = np.linalg.svd(weight, compute_uv=False)
        error = np.linalg.norm(weight - up @ found.down)
        assert error == pytest.approx(np.linalg.norm(singular[20:]))


@pytest.mark.parametrize(("rank", "of_keys"), [(40, 20), (150, 86), (6, 3), (1, 0)])
def test_a_split_latent_wastes_no_rank(rank, of_keys):
    keys, values = weights()
    found = split(keys, values, rank)
    assert found.down.shape == (rank, D)
    assert (found.key_up != 0).any(axis=0).sum() == of_keys
    assert not (found.key_up != 0).any(axis=0)[of_keys:].any()


@pytest.mark.parametrize("factor", [joint, split])
def test_no_unrotated_keys(factor):
    _, values = weights()
    none = np.zeros((0, D))
    found = factor(none, values, 24)
    assert relative_error(values, found.value_up @ found.down, np.eye(D)) < 1e-12
    found = balanced(none, values, 24, np.eye(D))
    assert relative_error(values, found.value_up @ found.down, np.eye(D)) < 1e-12
    assert relative_error(none, none, np.eye(D)) == 0
