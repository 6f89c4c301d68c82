"""Slots, pages and tables, counted by hand."""

import pytest

from kvjax.sizing import Dense, LayerSpec, ModelSpec, Paged, Ring
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


def test_the_layout_of_a_layer():
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
