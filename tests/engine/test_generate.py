"""Generation against the full forward pass, computed again for every token."""

import importlib
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from quick import rest_slow

from kvjax import models, sizing
from kvjax.cache import CapacityError, Kivi, SinkRing
from kvjax.engine import Eviction, Sampler, compress, decode, generate, prefill
from kvjax.evict import POLICIES, Protected

# The modules, which the package's functions of the same names hide.
generate_module = importlib.import_module("kvjax.engine.generate")
compress_module = importlib.import_module("kvjax.engine.compress")
GOLDEN = Path(__file__).parents[1] / "golden"
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(0, 96, length).tolist() for length in (5, 9, 1)]
NEW = 8


@cache
def model():
    return models.load(GOLDEN / "llama_gqa_tied", dtype="f32")


@jax.jit
def forward(model, tokens):
    return model(tokens)[0]


@cache
def expected() -> list[list[int]]:
    """Greedy continuations, each token from a forward pass over the whole row."""
    rows = []
    for prompt in PROMPTS:
        row = list(prompt)
        for _ in range(NEW):
            # Right padding to one length; causal attention does not see it.
            padded = np.array([row + [0] * (24 - len(row))])
            row.append(int(forward(model(), padded)[0, len(row) - 1].argmax()))
        rows.append(row[len(prompt) :])
    return rows


def run(prompts=PROMPTS, new=NEW, **settings) -> list[list[int]]:
    return generate(model(), prompts, new, **{"codec": "f32", **settings})


def test_greedy_is_the_argmax_of_the_full_forward_pass():
    assert run() == expected()
    assert len({tuple(row) for row in expected()}) == len(PROMPTS)


def test_a_row_of_a_ragged_batch_is_the_row_alone():
    assert run([PROMPTS[0]]) == [expected()[0]]


def test_prompts_longer_than_a_chunk_are_read_in_chunks(monkeypatch):
    monkeypatch.setattr(generate_module, "CHUNK", 4)
    assert run() == expected()


def test_eos_ends_its_row_alone():
    first, second, third = expected()
    eos = next(token for token in first[2:] if token not in first[:2] + second + third)
    assert run(eos=[eos]) == [first[: first.index(eos) + 1], second, third]


def test_generation_stops_when_all_rows_have_ended():
    steps: list[int] = []
    ends = [row[1] for row in expected()]
    rows = run(eos=ends, progress=steps.append)
    assert all(len(row) <= 2 and row[-1] in ends for row in rows)
    assert steps == list(range(1, max(map(len, rows)) + 1))


def test_progress_counts_every_step():
    steps: list[int] = []
    run(progress=steps.append)
    assert steps == list(range(1, NEW + 1))


def test_no_new_tokens():
    assert run(new=0) == [[], [], []]


SAMPLED = Sampler(temperature=1.5, top_k=50, top_p=0.95)


def test_a_seed_gives_the_same_tokens_again_and_another_gives_others():
    first = run(sampler=SAMPLED, seed=1)
    assert first == run(sampler=SAMPLED, seed=1)
    assert first != run(sampler=SAMPLED, seed=2)
    assert first != expected()


def test_steps_draw_anew():
    """With flat logits, one key for all steps would repeat one token."""
    flat = jax.tree.map(lambda leaf: leaf * 0, model())
    [row] = generate(flat, [[1]], 16, sampler=Sampler(1.0))
    assert len(set(row)) > 8


def test_a_row_draws_by_its_place_whatever_comes_after_it():
    assert run(PROMPTS[:1], sampler=SAMPLED) == run(sampler=SAMPLED)[:1]


def test_the_codec_reaches_the_cache():
    with pytest.raises(ValueError, match="codec='nvfp4': caches can hold"):
        run(codec="nvfp4")


def test_capacity_that_is_just_enough():
    needed = max(map(len, PROMPTS)) + NEW - 1
    assert run(capacity=needed) == expected()
    with pytest.raises(CapacityError, match=f"capacity={needed - 1}.*need {needed}"):
        run(capacity=needed - 1)


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([], 1, "prompts: at least one"),
        ([[1], []], 1, "prompt 1 is empty"),
        ([[1], [2, 96]], 1, "prompt 1 has token ids outside 0 to 95"),
        ([[-1]], 1, "prompt 0 has token ids outside 0 to 95"),
        ([[1]], -1, "max_new_tokens=-1"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused(prompts, new, message):
    with pytest.raises(ValueError, match=message):
        run(prompts, new)


def test_prompts_may_be_arrays():
    assert run(np.array([PROMPTS[0]])) == [expected()[0]]


def test_more_than_the_learned_positions_is_refused():
    gpt2 = models.load(GOLDEN / "gpt2_conv1d")
    with pytest.raises(ValueError, match="capacity=49 exceeds the model's 48 learned positions"):
        generate(gpt2, [[1] * 40], 10)


# Windows small enough for these prompts.
SMALL = {
    name: replace(POLICIES[name], observe=4, protected=Protected(recent=4))
    for name in ("snapkv", "adakv")
}


ENOUGH = max(map(len, PROMPTS)) + NEW - 2


@pytest.mark.parametrize("budget", rest_slow([100, ENOUGH], [ENOUGH]))
def test_an_eviction_of_nothing_changes_nothing(budget):
    """A budget for all tokens to come, and one that is just enough whenever it is applied."""
    assert run(eviction=Eviction(SMALL["snapkv"], budget, every=5)) == expected()


def evicted_by_hand(policy, budget, every, new) -> list[list[int]]:
    """Step by step, with an eviction where the next token would find no room."""
    lengths = np.array([len(prompt) for prompt in PROMPTS], np.int32)
    tokens = np.zeros((len(PROMPTS), lengths.max()), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    cache = model().init_cache(len(PROMPTS), lengths.max(), codec="f32")
    logits, cache = prefill(model(), tokens, cache, lengths)
    cache = compress(model(), cache, tokens, policy, budget, count=lengths, room=every)
    chosen = [np.asarray(logits.argmax(-1), np.int32)]
    for step in range(1, new):
        if step > 1 and (step - 1) % every == 0:
            came = np.stack(chosen[-1 - every : -1], 1)
            cache = compress(model(), cache, came, policy, budget, room=every)
        ones = np.ones(len(PROMPTS), np.int32)
        logits, cache = decode(model(), chosen[-1][:, None], cache, ones)
        chosen.append(np.asarray(logits[:, 0].argmax(-1), np.int32))
    return np.stack(chosen, 1).tolist()


@pytest.mark.parametrize("name", rest_slow(SMALL, ["snapkv"]))
def test_evictions_between_steps(name, monkeypatch):
    """Past the budget several times: the tokens of the explicit loop, in memory that stays.

    One row ends early. Heads that keep different numbers of tokens have slots in multiples of 4.
    """
    monkeypatch.setattr(compress_module, "RAGGED_MULTIPLE", 4)
    budget, every, new = 6, 5, 24
    want = evicted_by_hand(SMALL[name], budget, every, new)
    eos = want[0][7]
    want = [row[: row.index(eos) + 1] if eos in row else row for row in want]
    assert len({len(row) for row in want}) > 1
    sizes: list[int] = []
    stale: list[tuple] = []

    def progress(done: int) -> None:
        of_prompts = (max(map(len, PROMPTS)),)
        stale.extend(x.shape for x in jax.live_arrays() if x.shape[2:3] == of_prompts)

    eviction = Eviction(SMALL[name], budget, every)
    generate_module._next.clear_cache()
    got = run(new=new, eos=[eos], eviction=eviction, progress=progress, cache_bytes=sizes.append)
    assert got == want
    assert not stale
    _, *later = sizes
    assert len(later) == 1 + (new - 2) // every
    assert generate_module._next._cache_size() == len(set(later))
    assert len(set(later)) <= (1 if name == "snapkv" else 3)


def test_the_bytes_of_an_eviction():
    """The prompt's cache; then the budget and as much room as tokens are still to come."""
    [long] = RANDOM.integers(0, 96, (1, 40)).tolist()
    sizes: list[int] = []
    run([long], 4, eviction=Eviction(SMALL["snapkv"], 8, every=99), cache_bytes=sizes.append)
    spec = sizing.load(GOLDEN / "llama_gqa_tied")
    evicted = sizing.Kept(8, room=3, per_head=True)
    assert sizes == [spec.cache_bytes(40, 1, "f32", kept=kept).total for kept in (None, evicted)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"codec": Kivi(4, group=4, residual=8)}, "keep: keys of codec kivi4 share a scale over 4"),
        ({"layout": SinkRing(2, 4)}, "eviction: got a cache whose layers keep a window alone"),
        ({"eviction": Eviction(POLICIES["snapkv"], 10)}, "budget: got 10; .* the 64 tokens"),
        (
            {"eviction": Eviction(replace(POLICIES["pyramidkv"], observe=4), 10)},
            "budget: got 10; .* the 64",
        ),
    ],
    ids=["kivi", "sinks", "snapkv", "pyramidkv"],
)
def test_what_cannot_be_evicted_is_refused_before_the_prompts_are_read(
    settings, message, monkeypatch
):
    monkeypatch.delattr(generate_module, "read_prompts")
    with pytest.raises(ValueError, match=message):
        run(**{"eviction": Eviction(SMALL["snapkv"], 6, 5), **settings})
