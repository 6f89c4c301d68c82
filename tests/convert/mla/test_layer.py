"""One layer, against attention as it is defined, in float64."""

import numpy as np
import pytest

from kvjax.convert.mla import layer
from kvjax.convert.mla.heads import Heads, from_pairs, to_pairs
from kvjax.convert.mla.mha2mla import SELECT, Mha2Mla
from kvjax.convert.mla.transmla import TransMla, rotations

D, N, H, HV, T, S = 24, 4, 8, 6, 7, 200
WAYS = [TransMla(), *(Mha2Mla(select, svd) for select in SELECT for svd in ("joint", "split"))]


def heads(kv_heads=2, rotated=H, magnitude=1.0, seed=0):
    """Random projections, the biases in the last column."""
    rng = np.random.default_rng(seed)
    shapes = ((N, H, D + 1), (kv_heads, H, D + 1), (kv_heads, HV, D + 1))
    return Heads(*(rng.normal(size=shape) for shape in shapes), rotated, magnitude)


def to_latent(h, way, rank, rope_dim, moment):
    """The layer, and the frequencies of its rope channels."""
    basis = way.basis(h, rope_dim, moment)
    return layer.to_latent(h, way, basis, rank, moment), basis.pairs.reshape(-1).tolist()


def inputs(seed=1):
    """(S, D + 1), the last column 1, and their moment (D + 1, D + 1)."""
    x = np.random.default_rng(seed).normal(size=(S, D + 1)) * np.linspace(0.2, 2, D + 1)
    x[:, -1] = 1
    return x, x.T @ x / S


def frequencies(rotated=H):
    return 0.9 ** np.arange(rotated // 2)


def rotate(y, frequency, magnitude=1.0):
    """(T, ..., R) with pairs (i, i + R/2), as complex numbers, turned by position * frequency."""
    first, second = np.split(y, 2, axis=-1)
    shape = (len(y), *(1,) * (y.ndim - 2), len(frequency))
    angle = np.multiply.outer(np.arange(len(y)), frequency).reshape(shape)
    turned = (first + 1j * second) * np.exp(1j * angle) * magnitude
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attend(scores, values, scale):
    """Causal, scores (N, T, T) and values (T, N, HV) -> (T, N, HV)."""
    scores = np.where(np.tri(T, dtype=bool), scores * scale, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("nts,snv->tnv", weights / weights.sum(axis=-1, keepdims=True), values)


def by_heads(h, x, frequency=None):
    """Output (T, N, HV) of the source."""
    frequency = frequencies(h.rotated) if frequency is None else frequency
    q, k, v = (np.einsum("hcd,td->thc", part, x) for part in (h.q, h.k, h.v))
    turned = [
        np.concatenate(
            [
                rotate(part[..., : h.rotated], frequency, h.magnitude),
                part[..., h.rotated :],
            ],
            axis=-1,
        )
        for part in (q, np.repeat(k, h.group, axis=1))
    ]
    scores = np.einsum("tnc,snc->nts", *turned)
    return attend(scores, np.repeat(v, h.group, axis=1), H**-0.5)


def by_latents(latent, pairs, h, x, rank, rope_heads, frequency=None):
    """Output (T, N, HV) of the converted layer."""
    frequency = frequencies(h.rotated) if frequency is None else frequency
    frequency = frequency[pairs]
    both = x @ latent.down.T
    c, k_rope = both[:, :rank], rotate(both[:, rank:], frequency, h.magnitude)
    q = np.einsum("ncd,td->tnc", latent.q, x)
    unrotated = latent.k_up.shape[1]
    nope = np.einsum("tnc,ncl,sl->nts", q[..., :unrotated], latent.k_up, c)
    # Rope keys one by one: of all of them the first halves come first.
    k_rope = k_rope.reshape(T, 2, rope_heads, -1).swapaxes(1, 2).reshape(T, rope_heads, -1)
    frequency = frequency.reshape(rope_heads, -1)
    rope = [
        rotate(q[:, n, unrotated:], frequency[j], h.magnitude) @ k_rope[:, j].T
        for n in range(N)
        for j in [n * rope_heads // N]
    ]
    values = np.einsum("sl,nlv->snv", c, latent.v_up) + latent.value_bias
    return attend(nope + np.stack(rope), values, H**-0.5)


def full(way, h):
    """Rope dim and rank at which nothing is left out."""
    rope_dim = h.rotated * len(h.k) // way.rope_heads(len(h.k))
    return rope_dim, len(h.k) * (h.k.shape[1] - h.rotated + HV)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("rotated", "magnitude"), [(H, 1.0), (H, 1.3), (4, 1.3)])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_nothing_left_out_is_the_same_function(way, rotated, magnitude, kv_heads):
    h, (x, moment) = heads(kv_heads, rotated, magnitude), inputs()
    rope_dim, rank = full(way, h)
    latent, pairs = to_latent(h, way, rank, rope_dim, moment)
    found = by_latents(latent, pairs, h, x[:T], rank, way.rope_heads(kv_heads))
    np.testing.assert_allclose(found, by_heads(h, x[:T]), atol=1e-12)
    assert max(latent.losses.key_error, latent.losses.value_error) < 1e-12
    assert (
        latent.losses.rope_energy == pytest.approx(1)
        if rotated == H
        else latent.losses.rope_energy < 1
    )


@pytest.mark.parametrize("way", [TransMla(), TransMla(2), Mha2Mla()], ids=str)
def test_rope_that_is_dropped_changes_no_weight_at_equal_positions(way):
    """At full rank, and without turning what stays rotated: as if all tokens were at position 0."""
    h, (x, moment) = heads(magnitude=1.3), inputs()
    rope_heads = way.rope_heads(2)
    rank = 2 * (H + HV) - 4 * rope_heads
    latent, pairs = to_latent(h, way, rank, 4, moment)
    still = np.zeros(H // 2)
    found = by_latents(latent, pairs, h, x[:T], rank, rope_heads, still)
    np.testing.assert_allclose(found, by_heads(h, x[:T], still), atol=1e-12)


def test_rotations_commute_with_rope_and_keep_scores():
    h, (x, moment) = heads(4), inputs()
    mix, _ = rotations(h, 1, moment)
    identity = np.einsum("sab,scb->sac", mix, mix)
    np.testing.assert_allclose(identity, np.broadcast_to(np.eye(4), identity.shape), atol=1e-12)

    def mixed(keys):
        """(T, K, H), each frequency's pairs over heads."""
        pairs = to_pairs(keys, axis=2)
        return from_pairs(np.einsum("fab,tbfc->tafc", mix, pairs), axis=2)

    keys = np.einsum("hcd,td->thc", h.k, x)
    one, other = mixed(rotate(keys, frequencies())), rotate(mixed(keys), frequencies())
    np.testing.assert_allclose(one, other, atol=1e-12)
    queries = rotate(np.random.default_rng(2).normal(size=keys.shape), frequencies())
    scores = np.einsum("thc,shc->ts", queries, rotate(keys, frequencies()))
    found = np.einsum("thc,shc->ts", mixed(queries), other)
    np.testing.assert_allclose(found, scores, atol=1e-12)


def test_energy_collects_in_the_first_slots():
    """Keys of heads that are nearly alike need one slot; the mean squares are those of the keys."""
    h, (x, moment) = heads(4), inputs()
    alike = h.k[:1] + 0.05 * h.k
    h = Heads(h.q, alike, h.v, H)
    mix, energy = rotations(h, 1, moment)
    assert (np.diff(energy, axis=1) <= 0).all()
    assert (energy[:, 0] > 0.98 * energy.sum(axis=1)).all()
    pairs = to_pairs(np.einsum("hcd,td->thc", alike, x), axis=2)
    slots = np.einsum("fab,tbfc->tfac", mix, pairs)
    np.testing.assert_allclose(np.square(slots).sum(axis=-1).mean(axis=0), energy, atol=1e-10)
    before = np.square(pairs).sum(axis=-1).mean(axis=0).T
    assert (before.max(axis=1) < 0.3 * energy[:, 0]).all()
    assert to_latent(h, TransMla(), 8, H, moment)[0].losses.rope_energy > 0.98


def test_what_stays_rotated_are_first_slots_then_those_of_most_energy():
    h, (_, moment) = heads(2), inputs()
    _, energy = rotations(h, 1, moment)
    _, pairs = to_latent(h, TransMla(), 4, H + 4, moment)
    first, second = pairs[: H // 2], pairs[H // 2 :]
    assert sorted(first) == list(range(H // 2))
    assert second == np.argsort(-energy[:, 1])[:2].tolist()


def test_folded_frequencies_collect_more_energy():
    h, (_, moment) = heads(4), inputs()
    shares = [
        to_latent(h, TransMla(fold), 4, 4, moment)[0].losses.rope_energy for fold in (1, 2, 4)
    ]
    assert shares == sorted(shares)
    assert shares[0] + 0.05 < shares[2]


def test_a_folded_slot_turns_as_fast_as_most_of_it():
    """Of each two frequencies that are mixed, the keys have much more of the second."""
    h, (_, moment) = heads(2), inputs()
    h.k[:, [0, 2, 4, 6]] *= 0.1
    _, pairs = to_latent(h, TransMla(2), 4, 4, moment)
    assert sorted(pairs) == [1, 3]


@pytest.mark.parametrize(
    ("select", "pairs"),
    [("high", [0, 1]), ("low", [2, 3]), ("uniform", [0, 2])],
)
def test_pairs_by_frequency(select, pairs):
    _, found = to_latent(heads(2), Mha2Mla(select), 4, 4, inputs()[1])
    assert found == [*pairs, *pairs]


def test_pairs_by_norm_are_those_of_each_head():
    h, (x, moment) = heads(2), inputs()
    _, found = to_latent(h, Mha2Mla("2-norm"), 4, 4, moment)
    q, k = (np.einsum("hcd,td->thc", part, x) for part in (h.q, h.k))
    expected = []
    for head in range(2):
        norms = []
        for pair in range(H // 2):
            of_q, of_k = (part[..., [pair, pair + H // 2]] for part in (q, k))
            own = np.sqrt(np.square(of_q[:, 2 * head : 2 * head + 2]).sum(-1).mean(0))
            norms.append((own * np.sqrt(np.square(of_k[:, head]).sum(-1).mean())).sum())
        expected += sorted(np.argsort(norms)[-2:].tolist())
    assert found == expected
    assert expected[:2] != expected[2:]


@pytest.mark.parametrize("way", [TransMla(), Mha2Mla(svd="joint"), Mha2Mla(svd="split")], ids=str)
def test_more_rank_is_never_worse(way):
    """By the moment that is minimised over: of the data, or of the weights themselves."""
    h, (_, moment) = heads(2), inputs()
    measure = moment if isinstance(way, TransMla) else np.eye(D + 1)
    latents = [to_latent(h, way, rank, 4, measure)[0] for rank in range(2, 21, 2)]
    errors = np.array([one.losses[:2] for one in latents])
    assert (np.diff(errors, axis=0) <= 1e-9).all()
    assert (errors[-1] < 0.6 * errors[0]).all()


BAD = [
    (TransMla(), 3, "rope_dim: got 3; accepted: an even number from 2 to 16, .*all KV heads"),
    (TransMla(), 18, "rope_dim: got 18"),
    (TransMla(3), 4, "fold: got 3; accepted: a divisor of 4"),
    (Mha2Mla(), 10, "rope_dim: got 10; accepted: an even number from 2 to 8, .*one KV head"),
    (Mha2Mla("largest"), 4, "select: got 'largest'; accepted: 2-norm, high, low, uniform"),
    (Mha2Mla(svd="both"), 4, "svd: got 'both'; accepted: joint, split"),
]


@pytest.mark.parametrize(("way", "rope_dim", "message"), BAD, ids=str)
def test_settings_that_do_not_fit(way, rope_dim, message):
    with pytest.raises(ValueError, match=message):
        way.check(rope_dim, 2, H)
