"""Slots, pages and tables, counted by hand."""

import pytest

from kvjax.sizing import Dense, Kept, Kivi, LayerSpec, ModelSpec, Paged, Ring
from kvjax.sizing.layouts import layout_of


@pytest.mark.parametrize(
    ("ring", "slots"),
    [
        (Ring(8), {0: 0, 5: 5, 8: 8, 100: 8}),
        (Ring(1), {1: 1, 100: 1}),
        # A step that writes 4 tokens: the first still sees the 7 before it, 11 keys in all.
        (Ring(8, in_flight=4), {5: 5, 11: 11, 100: 11}),
        (Ring(8, in_flight=4, multiple=16), {0: 0, 1: 16, 16: 16, 17: 16, 100: 16}),
        (Ring(128, multiple=128), {1: 128, 129: 128}),
        (Ring(129, multiple=128), {1: 128, 128: 128, 129: 256, 1000: 256}),
    ],
)
def test_rings(ring, slots):
    assert {tokens: ring.slots(tokens) for tokens in slots} == slots


def pages_touched(first: int, last: int, page_size: int) -> int:
    return last // page_size - first // page_size + 1


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 16, 17, 33])
def test_pages_of_a_window_are_the_most_that_it_touches(page_size, window):
    layout = Paged(page_size, window)
    most = 0
    for tokens in range(1, 4 * (window + page_size)):
        first = max(0, tokens - window)
        most = max(most, pages_touched(first, tokens - 1, page_size))
        assert layout.pages(tokens) == most
        assert layout.slots(tokens) == most * page_size
        assert layout.live(tokens) == min(tokens, window)


def test_pages_in_flight():
    # A step that writes 3 tokens sees 4 + 2 neighbours, which touch 3 pages of 4 at worst.
    assert Paged(4, 4, in_flight=3).pages(100) == 3
    assert Paged(4, 4).pages(100) == 2


def test_tables():
    assert Dense().table_bytes(100) == Ring(8).table_bytes(100) == 5
    assert Paged(16).table_bytes(17) == 5 + 2 * 4
    assert Paged(16, window=16).table_bytes(1000) == 5 + 2 * 4


def test_what_an_eviction_leaves():
    kept = Kept(10, room=3)
    assert [kept.slots(n) for n in (4, 10, 99)] == [7, 13, 13]
    assert [kept.live(n) for n in (4, 99)] == [4, 10]
    # Length, flag, length at the eviction; then a position a slot and a count, once or per head.
    assert kept.table_bytes(99, 8) == 5 + 4 + 13 * 4 + 4
    assert Kept(10, 3, per_head=True).table_bytes(99, 8) == 5 + 4 + 8 * (13 * 4 + 4)


def test_windows_lose_nothing():
    layers = LayerSpec(4, 2, 16, 16), LayerSpec(4, 2, 16, 16, window=8)
    spec = ModelSpec("test", 64, layers)
    assert spec.cache_bytes(99, kept=Kept(10, 3)).allocated == (13 + 8) * 2 * 32 * 2


def test_each_shard_has_positions_of_its_own_heads():
    spec = ModelSpec("test", 64, (LayerSpec(8, 4, 16, 16),))
    tables = [spec.cache_bytes(9, tp=tp, kept=Kept(4, per_head=True)).tables for tp in (1, 2)]
    assert tables == [9 + 4 * 20, 9 + 2 * 20]


@pytest.mark.parametrize(
    ("placing", "message"),
    [
        ({"kept": Kept(8), "page_size": 4}, "kept: got Kept.* with page_size 4"),
        ({"kept": Kept(8), "definition": "hf-static"}, "kept: got Kept.* with definition"),
        ({"kept": Kept(8), "codec": "kivi2"}, "codec: got 'kivi2', .* for a kept layout"),
    ],
)
def test_an_eviction_beside_another_layout_is_refused(placing, message):
    spec = ModelSpec("test", 64, (LayerSpec(8, 4, 16, 16),))
    with pytest.raises(ValueError, match=message):
        spec.cache_bytes(9, **placing)


@pytest.mark.parametrize(("sizes", "name"), [((0,), "budget"), ((1, -1), "room")])
def test_an_eviction_of_other_sizes_is_refused(sizes, name):
    with pytest.raises(ValueError, match=f"{name}: got"):
        Kept(*sizes)


def test_the_layout_of_a_layer():
    assert layout_of(None, kept=Kept(3)) == Kept(3)
    assert layout_of(8, kept=Kept(3)) == Ring(8)
    assert layout_of(None) == Dense()
    assert layout_of(8, in_flight=2, ring_multiple=4) == Ring(8, 2, 4)
    assert layout_of(None, 16) == Paged(16)
    assert layout_of(8, 16) == Paged(16, 8)


def test_a_chunk_counts_as_a_window_of_its_length():
    chunked = ModelSpec("test", 64, (LayerSpec(1, 1, 8, 8, chunk=8192),))
    assert chunked.cache_bytes(10_000).allocated == 8192 * 16 * 2


def test_waste_is_less_than_a_page_a_layer():
    """PagedAttention (Kwon et al. 2023): at most one page of each sequence is not full."""
    layer = LayerSpec(4, 2, 16, 16)
    spec = ModelSpec("test", 64, (layer,) * 3)
    for tokens in range(1, 70):
        found = spec.cache_bytes(tokens, 5, page_size=16)
        assert found.allocated - found.ideal < 5 * 3 * 16 * spec.bytes_per_token() // 3


def test_pages_hold_all_but_what_a_codec_keeps_exact():
    """KIVI of 128 exact tokens in pages of 64: of 300 tokens 172 take three pages, counted by hand.

    With a window of 200, of which 97 tokens are sure to be exact, codes of 103 touch three at most.
    """
    codec = Kivi("kivi2", 2, group=32, residual=128)
    for window, tokens, pages in (
        *((None, 128, 0), (None, 129, 1), (None, 300, 3)),
        *((200, 300, 3), (200, 2000, 3), (64, 2000, 1)),
    ):
        spec = ModelSpec("test", 64, (LayerSpec(2, 2, 64, 64, window=window),))
        found = spec.cache_bytes(tokens, codec=codec, page_size=64)
        numbers = 2 * 2 * 64  # of K and V a token
        assert found.allocated == numbers * (64 * pages * 3 // 8 + 128 * 2)
        assert found.tables == 5 + 4 * pages
