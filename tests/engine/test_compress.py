"""Eviction from a model's cache, policy by policy: what stays, what it costs, what it changes."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import rest_slow

from kvjax import models, sizing
from kvjax.cache import Paged
from kvjax.engine import Eviction, compress, decode, prefill
from kvjax.evict import POLICIES, Policy, Protected, Pyramid, scorers

GOLDEN = Path(__file__).parents[1] / "golden" / "llama_gqa_tied"
SPEC = sizing.load(GOLDEN)
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 40), np.int32)
LENGTHS, ONE = np.array([40, 31], np.int32), np.ones(2, np.int32)
CAPACITY, BUDGET = 48, 10
# Windows small enough for a prompt of 40 tokens.
SMALL = {
    "snapkv": {"observe": 4, "protected": Protected(recent=4)},
    "pyramidkv": {"observe": 4, "protected": Protected(recent=1), "budgets": Pyramid(beta=8)},
    "adakv": {"observe": 4, "protected": Protected(recent=4)},
}
SMALL_POLICIES = {name: replace(policy, **SMALL.get(name, {})) for name, policy in POLICIES.items()}
KINDS = {"f32": ("auto", "f32"), "int4": ("auto", "int4"), "pages": (Paged(4), "f32")}


@cache
def model():
    return models.load(GOLDEN, dtype="f32")


def filled(kind="f32", lengths=LENGTHS, tokens=TOKENS):
    layout, codec = KINDS[kind]
    empty = model().init_cache(2, CAPACITY, layout, codec)
    return prefill(model(), tokens, empty, np.asarray(lengths, np.int32))[1]


def evicted(policy, kind="f32", *, budget=BUDGET, room=3, lengths=LENGTHS):
    return compress(
        model(), filled(kind, lengths), TOKENS, policy, budget, count=lengths, room=room
    )


def positions(layer) -> list[list[set[int]]]:
    """For each row and head, the positions held."""
    return [[set(head[head >= 0].tolist()) for head in row] for row in np.asarray(layer.pos)]


def following(cache) -> np.ndarray:
    """Logits of two more tokens a row, one after the other."""
    first, cache = decode(model(), TOKENS[:, :1], cache, ONE)
    second, cache = decode(model(), TOKENS[:, 1:2], cache, ONE)
    cache.check()
    return np.stack([first, second])


@pytest.fixture(params=SMALL_POLICIES)
def policy(request) -> Policy:
    return SMALL_POLICIES[request.param]


# One whose heads keep alike, one whose do not, one that looks at no queries.
few_policies = pytest.mark.parametrize(
    "policy", rest_slow(SMALL_POLICIES, ["snapkv", "adakv", "streaming-llm"]), indirect=True
)


def test_what_is_protected_stays(policy):
    least = policy.protected
    for layer in evicted(policy).layers:
        budget = least.newest(BUDGET)
        for n, row in zip(LENGTHS, positions(layer), strict=True):
            for kept in row:
                assert set(range(least.sinks)) <= kept
                assert set(range(n - budget, n)) <= kept
                assert max(kept) < n


def test_each_layer_has_its_budget(policy):
    after = evicted(policy)
    kept = [sum(len(head) for row in positions(layer) for head in row) for layer in after.layers]
    heads = [layer.pos.shape[1] for layer in after.layers]
    assert sum(k / h for k, h in zip(kept, heads, strict=True)) == 2 * BUDGET * len(kept)
    if policy.budgets != Pyramid(beta=8):
        assert len(set(kept)) == 1


@few_policies
def test_a_budget_for_everything_changes_nothing(policy):
    """Ratio 0: the logits of the full cache, whether the budget is the tokens or the capacity."""
    want = following(filled())
    for budget in (40, CAPACITY, 1000):
        after = evicted(policy, budget=budget)
        for layer in after.layers:
            for n, row in zip(LENGTHS, positions(layer), strict=True):
                assert all(kept == set(range(n)) for kept in row)
        np.testing.assert_allclose(following(after), want, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", rest_slow(["snapkv", "streaming-llm", "pyramidkv"], ["snapkv"]))
def test_memory_is_that_of_the_slots_kept(name, kind):
    """What sizing says of the budget and the room, positions and counts included."""
    before, after = filled(kind), evicted(SMALL_POLICIES[name], kind)
    per_head = after.layers[0].pos.shape[1] > 1
    kept = sizing.Kept(BUDGET, room=3, per_head=per_head)
    said = SPEC.cache_bytes(CAPACITY, 2, KINDS[kind][1], kept=kept)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(after)) == after.nbytes == said.total
    assert after.nbytes < before.nbytes / 2


def test_heads_with_more_to_keep_decide_on_the_slots():
    """Ragged heads: as many slots as the greediest keeps, rounded up, and no more than before."""
    for layer in evicted(SMALL_POLICIES["adakv"]).layers:
        assert layer.capacity == min(32, CAPACITY) + 3
        assert int(layer.live.max()) <= 32
        assert (layer.live.sum(1) == 2 * BUDGET).all()


def test_rows_are_independent(policy):
    after = evicted(policy)
    other = TOKENS.copy()
    other[1] = (other[1] * 7 + 3) % 96
    cache = filled(tokens=other)
    changed = compress(model(), cache, other, policy, BUDGET, count=LENGTHS, room=3)
    for left, right in zip(after.layers, changed.layers, strict=True):
        assert positions(left)[0] == positions(right)[0]


@few_policies
def test_later_tokens_change_nothing(policy):
    """Causal: what is kept of a prompt depends on no padding, nor on what came after it."""
    short = np.array([30, 22], np.int32)
    want = evicted(policy, lengths=short)
    other = TOKENS.copy()
    other[:, 30:] = 7
    again = compress(model(), filled(lengths=short), other, policy, BUDGET, count=short, room=3)
    long = filled()
    recalled = long.rollback(LENGTHS - short)
    from_long = compress(model(), recalled, TOKENS, policy, BUDGET, count=short, room=3)
    for layer, *others in zip(want.layers, again.layers, from_long.layers, strict=True):
        assert all(positions(layer) == positions(other) for other in others)


@few_policies
@pytest.mark.parametrize("kind", ["int4", "pages"])
def test_other_codecs_and_layouts(policy, kind):
    """What is kept is bit for bit what was held."""
    before, after = filled(kind), evicted(policy, kind)
    for old, new in zip(before.layers, after.layers, strict=True):
        held, kept = old.block(jnp.int32(0)), new.block(jnp.int32(0))
        pos = np.broadcast_to(kept.pos, kept.k.shape[:3])
        for row, head, slot in np.argwhere(pos >= 0):
            at = pos[row, head, slot]
            np.testing.assert_array_equal(kept.k[row, head, slot], held.k[row, head, at])
            np.testing.assert_array_equal(kept.v[row, head, slot], held.v[row, head, at])


@pytest.mark.parametrize("name", ["snapkv", "tova"])
def test_the_newest_queries_decide(name):
    """Of the tokens given the last are observed: those alone give the same."""
    policy = SMALL_POLICIES[name]
    many = policy.observe
    last = np.take_along_axis(TOKENS, LENGTHS[:, None] - many + np.arange(many), axis=1)
    alone = compress(model(), filled(), last, policy, BUDGET, room=3)
    for left, right in zip(evicted(policy).layers, alone.layers, strict=True):
        assert positions(left) == positions(right)
    first = compress(model(), filled(), TOKENS[:, :many], policy, BUDGET, room=3)
    assert any(
        positions(left) != positions(right)
        for left, right in zip(first.layers, alone.layers, strict=True)
    )


def test_it_evicts_what_scores_least():
    """By a score that says which: odd positions."""
    odd = Policy(lambda seen: (seen.pos % 2).astype(jnp.float32), protected=Protected(1, 1))
    for layer in evicted(odd, budget=12).layers:
        for n, ((kept,),) in zip(LENGTHS, ([row] for row in positions(layer)), strict=True):
            assert sum(p % 2 for p in kept) >= 10
            assert {0, n - 1} <= kept


def test_windows_stay_as_they_are():
    """A layer that keeps a window alone has nothing to gain."""
    directory = GOLDEN.parent / "mistral_window"
    windowed = models.load(directory, dtype="f32")
    cache = windowed.init_cache(2, CAPACITY, codec="f32")
    rings = [layer.sight.window is not None for layer in cache.layers]
    assert any(rings)
    _, cache = prefill(windowed, TOKENS, cache, LENGTHS)
    after = compress(windowed, cache, TOKENS, SMALL_POLICIES["snapkv"], 12, count=LENGTHS)
    for ring, old, new in zip(rings, cache.layers, after.layers, strict=True):
        assert (new is old) == ring


def test_every_so_many_tokens():
    """Decoding with evictions between: positions go on, memory stays, nothing overflows."""
    eviction = Eviction(SMALL_POLICIES["snapkv"], budget=BUDGET, every=5)
    after = eviction(model(), filled(), TOKENS, LENGTHS)
    sizes = set()
    for step in range(17):
        if step and step % eviction.every == 0:
            after = eviction(model(), after, TOKENS[:, step - 5 : step])
        _, after = decode(model(), TOKENS[:, step : step + 1], after, ONE)
        sizes.add(after.nbytes)
    after.check()
    assert after.n.tolist() == [57, 48]
    assert len(sizes) == 1
    for layer in after.layers:
        assert layer.capacity == BUDGET + 5
        for n, row in zip([57, 48], positions(layer), strict=True):
            # The window of 4 at the last eviction, and the two tokens since.
            assert all(set(range(n - 6, n)) <= kept and len(kept) == 12 for kept in row)


def test_a_second_eviction_needs_only_what_is_left():
    """Evicting in two steps by a score of the token alone is evicting in one."""
    once = evicted(POLICIES["knorm"], budget=6)
    twice = evicted(POLICIES["knorm"], budget=20)
    twice = compress(model(), twice, None, POLICIES["knorm"], 6)
    for left, right in zip(once.layers, twice.layers, strict=True):
        assert positions(left) == positions(right)


@pytest.mark.parametrize(
    ("policy", "change", "message"),
    [
        ("snapkv", {"budget": 3}, "budget: got 3; accepted: at least 1, and the 4 tokens"),
        ("knorm", {"budget": 0}, "budget: got 0"),
        ("pyramidkv", {"budget": 7}, "budget: got 7, of which the last layer gets 0.875"),
        ("snapkv", {"tokens": None}, r"tokens: got None; accepted: \(2, T\)"),
        ("snapkv", {"tokens": TOKENS[:1]}, r"tokens: got shape \[1, 40\]"),
        ("snapkv", {"count": np.array([40, 40])}, r"count: got \[40, 40\]; accepted: .*\[40, 31\]"),
        ("snapkv", {"count": None}, r"count: got \[40, 40\]"),
        ("knorm", {"room": -1}, "room: got -1"),
    ],
)
def test_what_cannot_be_done_is_refused(policy, change, message):
    given = {"tokens": TOKENS, "budget": BUDGET, "count": LENGTHS, "room": 0} | change
    tokens, budget = given.pop("tokens"), given.pop("budget")
    with pytest.raises(ValueError, match=message):
        compress(model(), filled(), tokens, SMALL_POLICIES[policy], budget, **given)


@pytest.mark.parametrize("name", ["budget", "every"])
def test_an_eviction_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}: got 0; accepted: 1 and more"):
        Eviction(POLICIES["knorm"], **{name: 0})


def test_the_mean_mass_has_no_favourites():
    """Observed by all of a prompt's queries, early tokens are seen by more of them."""
    policy = replace(SMALL_POLICIES["h2o"], score=scorers.mean_mass, protected=Protected())
    total = replace(policy, score=scorers.total_mass)
    age = [
        np.mean([np.mean(list(kept)) for row in positions(layer) for kept in row])
        for chosen in (policy, total)
        for layer in evicted(chosen).layers
    ]
    assert min(age[:2]) > max(age[2:])
