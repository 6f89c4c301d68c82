"""What KVPress keeps of the same keys, values and queries.

`scripts/make_golden_eviction.py` says how the file was made.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Record, init_layer_cache
from kvjax.evict import POLICIES, TOVA, Policy, Protected, Pyramid, Queries, Seen, choose, scorers
from kvjax.nn import Rope
from kvjax.ops import attend, slot_positions

WINDOW, BUDGET = 8, 24
SMALL = {"observe": WINDOW, "protected": Protected(recent=WINDOW)}
CASES: dict[str, Policy] = {
    "snapkv": replace(POLICIES["snapkv"], **SMALL),
    "adakv": replace(POLICIES["adakv"], **SMALL),
    # TOVA itself may drop the newest token; theirs keeps it.
    "tova": replace(TOVA, protected=Protected(recent=1)),
    "knorm": POLICIES["knorm"],
    "keydiff": POLICIES["keydiff"],
    "expected-attention": POLICIES["expected-attention"],
    "observed-attention": Policy(scorers.mean_mass, observe=None),
    "streaming-llm": POLICIES["streaming-llm"],
}


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parents[1] / "golden" / "eviction.npz") as file:
        return dict(file)


@pytest.mark.parametrize("name", CASES)
def test_the_same_tokens_are_kept(name):
    policy, given = CASES[name], golden()
    batch, kv_heads, tokens, dim = given["k"].shape
    rope = Rope(dim, theta=float(given["theta"]))
    # Policies that observe none are given all, and make nothing of them.
    first = tokens - (policy.observe or tokens)
    positions = jnp.tile(jnp.arange(first, tokens, dtype=jnp.int32), (batch, 1))
    empty = init_layer_cache(
        batch, tokens, kv_heads=kv_heads, key_dim=dim, value_dim=dim, codec="f32"
    )

    @jax.jit
    def slots(k, v, unrotated):
        held = empty.append(Record(k, v), jnp.full(batch, tokens))
        q = rope(unrotated, positions)
        settings = {"window": None, "sink_logits": None, "soft_cap": None, "scale": None}
        _, lse = attend(q, held, positions, **settings)
        queries = Queries(q, unrotated, positions, lse)
        seen = Seen(held, slot_positions(held), queries, rope, settings)
        return choose(seen, policy.score(seen), BUDGET, policy.protected, policy.heads)

    found = np.asarray(slots(given["k"], given["v"], given["q"][:, first:]))
    found = np.broadcast_to(found, (batch, kv_heads, found.shape[2]))
    for row, head in np.ndindex(batch, kv_heads):
        want = given[f"kept_{name}"][row, head]
        got = found[row, head]
        assert set(got[got >= 0]) == set(want[want >= 0])


def test_a_pyramid_is_theirs_where_they_have_one():
    """And where they keep the same of every layer instead, it is refused."""
    cases = golden()["pyramid"]
    for tokens, ratio in dict.fromkeys(map(tuple, cases[:, :2])):
        theirs = cases[(cases[:, 0] == tokens) & (cases[:, 1] == ratio), 3]
        budget = round(tokens * (1 - ratio))
        if len(set(theirs)) == 1:
            with pytest.raises(ValueError, match="of which the last layer gets"):
                Pyramid()(len(theirs), int(tokens), budget, 64)
        else:
            ours = Pyramid()(len(theirs), int(tokens), budget, 64)
            assert np.abs(np.array(ours) - theirs).max() <= 1
