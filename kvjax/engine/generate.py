"""Generation: a batch of prompts of any lengths, each row until its end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.cache import Cache, CapacityError, LayoutChoice, Scales
from kvjax.engine.compress import Eviction
from kvjax.engine.sampling import Sampler
from kvjax.engine.steps import prefill
from kvjax.nn import Decoder

# Prompts are read in chunks of this many tokens, or of the next power of two where all are
# shorter, so that prefill compiles for few shapes.
CHUNK = 256


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampler: Sampler = Sampler(),
    eos: Collection[int] = (),
    seed: int = 0,
    capacity: int | None = None,
    layout: LayoutChoice = "auto",
    codec: str = "bf16",
    scales: Scales | None = None,
    eviction: Eviction | None = None,
    progress: Callable[[int], None] | None = None,
    cache_bytes: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Continue each prompt.

    Args:
      model: the decoder.
      prompts: token ids, one sequence a row; lengths may differ.
      max_new_tokens: the most tokens to add to a row.
      sampler: how tokens are chosen.
      eos: token ids that end a row; the one that ended it is the row's last token.
      seed: of the random numbers. A row's tokens depend on the seed and its place in the batch.
      capacity: cache slots a row; None takes what the longest prompt and max_new_tokens need. With
        an eviction, of the prompts' cache, which then needs no room for new tokens.
      layout, codec, scales: of the cache, as in `Decoder.init_cache`.
      eviction: what to evict after the prompts have been read, by all of their tokens, and each
        time that so many were decoded, by those. At most the prompts' cache is held, or its budget
        and room for `every` tokens; nothing is evicted where the budget holds all tokens to come.
      progress: called after every step with the number of tokens per row so far.
      cache_bytes: called with the bytes of the cache: when it is made, and after each eviction.

    Returns:
      The new tokens of each row.

    Raises:
      CapacityError: a prompt and its new tokens do not fit the capacity.
      ValueError: no prompts, an empty prompt, a token id outside the vocabulary, or a cache that
        cannot be, or not be evicted from.
    """
    needed = check(model, prompts, max_new_tokens)
    if eviction is not None:
        cache_shapes(model, len(prompts), needed, layout, codec, eviction)
        needed, eviction = _with_eviction(eviction, prompts, needed, max_new_tokens)
    capacity = needed if capacity is None else capacity
    if capacity < needed:
        raise CapacityError(
            f"capacity={capacity}: the longest prompt and max_new_tokens need {needed}"
        )
    if max_new_tokens == 0:
        return [[] for _ in prompts]
    cache = model.init_cache(len(prompts), capacity, layout, codec, scales=scales)
    say_bytes = cache_bytes or (lambda _: None)
    say_bytes(cache.nbytes)
    logits, cache = read_prompts(model, prompts, cache)
    if eviction is not None:
        cache = eviction(model, cache, *_padded(prompts, CHUNK))
        say_bytes(cache.nbytes)
    keys = jax.random.split(jax.random.key(seed), max_new_tokens)
    tokens = sampler(logits, keys[0])
    rows: list[list[int]] = [[] for _ in prompts]
    alive = np.ones(len(prompts), bool)
    for step in range(max_new_tokens):
        for row, token in enumerate(np.asarray(tokens)):
            if alive[row]:
                rows[row].append(int(token))
                alive[row] = int(token) not in eos
        if progress is not None:
            progress(step + 1)
        if step + 1 == max_new_tokens or not alive.any():
            break
        if eviction is not None and step and step % eviction.every == 0:
            # A row's last token is not in the cache: it comes next, or has ended the row.
            since = [row[step - eviction.every : -1] for row in rows]
            cache = eviction(model, cache, *_padded(since, eviction.every))
            say_bytes(cache.nbytes)
        count = jnp.asarray(alive, jnp.int32)
        tokens, cache = _next(model, tokens, cache, count, keys[step + 1], sampler)
    cache.check()
    return rows


def _with_eviction(
    eviction: Eviction, prompts: Sequence[Sequence[int]], needed: int, max_new_tokens: int
) -> tuple[int, Eviction | None]:
    """Slots of the prompts' cache, and the eviction; None where its budget holds all `needed`."""
    if eviction.budget >= needed:
        return needed, None
    # Of what no token is left to fill, no room is made.
    every = min(eviction.every, max(max_new_tokens - 1, 1))
    return max(*map(len, prompts), eviction.budget), replace(eviction, every=every)


def read_prompts(
    model: Decoder, prompts: Sequence[Sequence[int]], cache: Cache
) -> tuple[Array, Cache]:
    """Prefill the prompts chunk by chunk; the logits (B, V) after each row's last token."""
    width = min(CHUNK, 1 << (max(map(len, prompts)) - 1).bit_length())
    padded, lengths = _padded(prompts, width)
    last = jnp.zeros((len(prompts), model.config.vocab_size))
    for start in range(0, padded.shape[1], width):
        count = np.clip(lengths - start, 0, width).astype(np.int32)
        logits, cache = prefill(model, padded[:, start : start + width], cache, count)
        last = jnp.where((count > 0)[:, None], logits, last)
    return last, cache


def _padded(rows: Sequence[Sequence[int]], multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows right-padded to a multiple (B, T) int32, and their lengths (B,) int32."""
    lengths = np.array([len(row) for row in rows], np.int32)
    padded = np.zeros((len(rows), -(-int(lengths.max()) // multiple) * multiple), np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded, lengths


@partial(jax.jit, static_argnames="sampler", donate_argnames="cache")
def _next(
    model: Decoder, tokens: Array, cache: Cache, count: Array, key: Array, sampler: Sampler
) -> tuple[Array, Cache]:
    """Decode one token (B,) a row and choose the next; rows with count 0 rest."""
    logits, cache = model(tokens[:, None], cache, count=count, logits="last")
    return sampler(logits, key), cache


def check(model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Slots that the longest row needs; ValueError for prompts that cannot be read."""
    if not len(prompts):
        raise ValueError("prompts: at least one is needed")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens}: at least 0 is needed")
    vocab = model.config.vocab_size
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {row} is empty: at least one token is needed")
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise ValueError(f"prompt {row} has token ids outside 0 to {vocab - 1}")
    # The last token is chosen and never fed back, so it takes no slot.
    return max(map(len, prompts)) + max(max_new_tokens - 1, 0)


def cache_shapes(
    model: Decoder,
    batch: int,
    capacity: int,
    layout: LayoutChoice,
    codec: str,
    eviction: Eviction | None = None,
) -> Cache:
    """The cache of rows of up to `capacity` tokens, as shapes; the model may be shapes alone.

    Raises:
      ValueError: for one that cannot be, or from which the eviction cannot evict.
    """
    shapes = jax.eval_shape(lambda: model.init_cache(batch, capacity, layout, codec))
    if eviction is not None:
        eviction.check(shapes, capacity)
    return shapes
