import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.nn import LinearScaling, Llama3Scaling, Rope, YarnScaling

X = np.random.default_rng(0).normal(size=(2, 6, 3, 8)).astype(np.float32)
POSITIONS = np.array([[0, 1, 2, 3, 4, 5], [40, 41, 42, 43, -1, -1]], np.int32)


def rotated(x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """RoPE by complex multiplication in float64: channels i and i + dim/2 are one number."""
    half = len(inv_freq)
    x = x.astype(np.float64)
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(
        1j * positions[..., None, None] * inv_freq
    )
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize("dim", [2, 4, 8])
def test_rotation_of_all_or_the_first_channels(dim):
    inv_freq = 100.0 ** (-np.arange(0, dim, 2) / dim)
    expected = rotated(X, np.maximum(POSITIONS, 0), inv_freq)
    np.testing.assert_allclose(Rope(dim, theta=100.0)(X, POSITIONS), expected, atol=2e-6)


def test_scores_depend_on_distance_alone():
    q, k = X[:1, :1], X[1:, :1]
    rope = Rope(8)
    scores = [
        np.sum(rope(q, np.array([[start + 5]])) * rope(k, np.array([[start]])))
        for start in (0, 3, 77)
    ]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-5)


def test_padding_is_left_as_it_is():
    np.testing.assert_array_equal(Rope(8)(X, POSITIONS)[1, 4:], X[1, 4:])


def test_the_dtype_is_kept_and_rounded_once():
    x = jnp.asarray(X, jnp.bfloat16)
    out = Rope(8)(x, POSITIONS)
    assert out.dtype == jnp.bfloat16
    expected = rotated(np.asarray(x), np.maximum(POSITIONS, 0), Rope(8).frequencies())
    # Half a unit in the last place of bf16's 8 bits, where |x| < 4.
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2**-8, atol=1e-5)


def test_linear_scaling_stretches_positions():
    stretched = Rope(8, scaling=LinearScaling(4.0))(X, POSITIONS * 4)
    np.testing.assert_allclose(stretched[:1], Rope(8)(X, POSITIONS)[:1], atol=1e-6)


def test_llama3_scaling_keeps_short_waves_and_divides_long_ones():
    plain = Rope(32, theta=5e5).frequencies()
    scaled = Rope(32, 5e5, Llama3Scaling(8.0, 1.0, 4.0, original_max_positions=512)).frequencies()
    turns = 512 * plain / (2 * np.pi)
    np.testing.assert_array_equal(scaled[turns >= 4], plain[turns >= 4])
    np.testing.assert_array_equal(scaled[turns <= 1], plain[turns <= 1] / 8)
    ramp = scaled[(turns > 1) & (turns < 4)] / plain[(turns > 1) & (turns < 4)]
    assert len(ramp)
    assert ((ramp > 1 / 8) & (ramp < 1)).all()


def test_yarn_keeps_short_waves_and_divides_long_ones():
    plain = Rope(32, theta=5e5).frequencies()
    scaled = Rope(32, 5e5, YarnScaling(4.0, 512, magnitude=1.5)).frequencies()
    turns = 512 * plain / (2 * np.pi)
    np.testing.assert_allclose(scaled[turns >= 40], plain[turns >= 40], rtol=1e-6)
    np.testing.assert_allclose(scaled[turns <= 0.5], plain[turns <= 0.5] / 4, rtol=1e-6)
    assert (np.diff(scaled / plain) <= 0).all()


def test_yarn_magnitude_multiplies_what_is_rotated():
    scaling = YarnScaling(4.0, 512, magnitude=1.5)
    out = Rope(4, 1e4, scaling)(X, POSITIONS)
    norms = np.linalg.norm(out[..., :4], axis=-1) / np.linalg.norm(X[..., :4], axis=-1)
    np.testing.assert_allclose(norms, 1.5, rtol=1e-5)
    np.testing.assert_array_equal(out[..., 4:], X[..., 4:])


def test_pairs_may_be_left_out_and_come_again():
    """Each is rotated as in a head of all of them."""
    every, pairs = Rope(8, theta=100.0), (3, 0, 3)
    some = Rope(8, theta=100.0, pairs=pairs)
    assert some.width == 6
    whole = X[..., [*pairs, *(pair + 4 for pair in pairs)]]
    for i, pair in enumerate(pairs):
        alone = np.zeros_like(X)
        alone[..., pair], alone[..., pair + 4] = whole[..., i], whole[..., i + 3]
        expected = np.asarray(every(alone, POSITIONS))[..., [pair, pair + 4]]
        np.testing.assert_array_equal(some(whole, POSITIONS)[..., [i, i + 3]], expected)
    with pytest.raises(ValueError, match=r"pairs: got 4; accepted: 0 to 3"):
        Rope(8, pairs=(4,))
