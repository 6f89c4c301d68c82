"""Faults planted in the library's own classes: each must fail the very check of a law."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import pytest

from kvjax.cache import Dense, PagedCache, Ring, Sight, SlotCache, codecs
from kvjax.cache.codecs import Cast, TokenScaled
from kvjax.nn import Shared, attention
from kvjax.ops import online, xla
from laws import checks
from laws.members import Axes


class Mutant(NamedTuple):
    """`put` takes the attribute's old value and gives the faulty one."""

    axes: Axes
    check: Callable
    owner: object
    name: str
    put: Callable


def longer_window(old):
    def visible(self, *positions):
        return old(replace(self, window=self.window + 1), *positions)

    return visible


def without_the_oldest(old):
    def held(self, slots, n):
        return jnp.where(old(self, slots, n) == n - self.window, -1, old(self, slots, n))

    return held


def sinks_of_exact_codecs_alone(old):
    def sight(self):
        return old.fget(self) if isinstance(self.codec, Cast) else Sight(self.layout.window)

    return property(sight)


def scales_of_values(old):
    def decode(self, leaves, scales):
        return old(self, {**leaves, "k_scale": leaves["v_scale"]}, scales)

    return decode


def with_the_other_rows_length(old):
    return lambda self, i: old(replace(self, n=self.n[::-1]), i)


def through_a_stale_table(old):
    return lambda self, i: old(replace(self, page_table=jnp.roll(self.page_table, 1, 1)), i)


def high_nibble_first(old):
    return lambda packed, n: old((packed >> 4) | (packed << 4), n)


def encoding_all_again(old):
    def append(self, record, count):
        again = self.codec.encode(self.codec.decode(self.leaves, self.scales), self.scales)
        return old(replace(self, leaves=again), record, count)

    return append


def with_heads_reversed(old):
    def block(self, i):
        block = old(self, i)
        return block._replace(k=block.k[:, ::-1], v=block.v[:, ::-1])

    return block


def queries_dealt_out_in_turn(old):
    def group(q, kv_heads):
        batch, tokens, heads, dim = q.shape
        dealt = q.reshape(batch, tokens, heads // kv_heads, kv_heads, dim).swapaxes(2, 3)
        return old(dealt.reshape(q.shape), kv_heads)

    return group


def nothing_at_all(old):
    def attend(*args, **settings):
        return tuple(jnp.zeros_like(x) for x in old(*args, **settings))

    return attend


def keys_as_values(old):
    def block(self, i):
        block = old(self, i)
        return block._replace(v=block.k)

    return block


def silently(old):
    return lambda self, record, count: replace(
        old(self, record, count), overflow=jnp.zeros_like(self.overflow)
    )


def one_slot_too_many(old):
    return lambda self, slots, n: old(self, slots, n + (n > 0))


whole, bits = checks.assert_one_function, checks.assert_nothing_is_encoded_twice
close = checks.assert_records_are_within_the_bound
MUTANTS = {
    "a window of one more": Mutant(
        Axes("windowed", "dense", "f32"), whole, online.ScoreRule, "visible", longer_window
    ),
    "a ring without its oldest": Mutant(
        Axes("windowed", "ring", "int4"), whole, Ring, "held", without_the_oldest
    ),
    "a ring written before it is read": Mutant(
        Axes("windowed", "ring", "f32"),
        whole,
        Shared,
        "uncached",
        lambda old: property(lambda self: ()),
    ),
    "sinks dropped under quantisation": Mutant(
        Axes("gqa", "sinks", "int8"), whole, SlotCache, "sight", sinks_of_exact_codecs_alone
    ),
    "scales of values used for keys": Mutant(
        Axes("gqa", "dense", "int8"), whole, TokenScaled, "decode", scales_of_values
    ),
    "scales of values used for keys, in fp8": Mutant(
        Axes("gqa", "dense", "fp8_e4m3_token"), close, TokenScaled, "decode", scales_of_values
    ),
    "lengths of rows swapped": Mutant(
        Axes("mha", "dense", "int8"), whole, SlotCache, "block", with_the_other_rows_length
    ),
    "a page found by a stale table": Mutant(
        Axes("gqa", "pages of 4", "f32"), whole, PagedCache, "block", through_a_stale_table
    ),
    "nibbles swapped": Mutant(
        Axes("gqa", "dense", "int4"), close, codecs, "unpack_nibbles", high_nibble_first
    ),
    "codes made of codes": Mutant(
        Axes("gqa", "dense", "int8"), bits, SlotCache, "append", encoding_all_again
    ),
    "codes made of codes, in fp8": Mutant(
        Axes("mha", "sinks", "fp8_e4m3_token"), bits, SlotCache, "append", encoding_all_again
    ),
    "KV heads in reverse": Mutant(
        Axes("mha", "dense", "int8"), whole, SlotCache, "block", with_heads_reversed
    ),
    "query heads dealt out in turn": Mutant(
        Axes("gqa", "dense", "f32"), whole, xla, "group_queries", queries_dealt_out_in_turn
    ),
    "all zero": Mutant(Axes("gqa", "dense", "f32"), whole, attention, "attend", nothing_at_all),
    "all zero, in int4": Mutant(
        Axes("gqa", "dense", "int4"), whole, attention, "attend", nothing_at_all
    ),
    "keys as values": Mutant(
        Axes("mqa", "dense", "int8"), whole, SlotCache, "block", keys_as_values
    ),
    "an overflow that nobody hears of": Mutant(
        Axes("gqa", "dense", "f32"),
        lambda member: checks.assert_overflow_is_not_silent(member, (1, 1)),
        SlotCache,
        "append",
        silently,
    ),
    "a dead slot seen": Mutant(
        Axes("gqa", "dense", "int8"),
        lambda member: checks.assert_dead_slots_take_no_part(member, (6, 2)),
        Dense,
        "held",
        one_slot_too_many,
    ),
}


def forget() -> None:
    """Drop what was compiled with other functions."""
    xla.decode.clear_cache()
    xla.prefill.clear_cache()
    checks.read_block.clear_cache()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_caught(name, monkeypatch):
    axes, check, owner, attribute, put = MUTANTS[name]
    forget()
    monkeypatch.setattr(owner, attribute, put(getattr(owner, attribute)))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(axes.member())
    forget()
