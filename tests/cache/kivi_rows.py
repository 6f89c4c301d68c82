"""KIVI caches filled, and what their rows hold, whichever layout they have."""

from itertools import cycle

import jax
import numpy as np

from kvjax.cache import Kivi, KiviCache, Record, init_layer_cache

SMALL = Kivi(bits=2, group=4, residual=8)
append = jax.jit(lambda cache, record, count: cache.append(record, count))
read_block = jax.jit(lambda cache, i: cache.block(i))


def empty(codec=SMALL, batch=2, capacity=40, heads=2, dim=8, layout="dense") -> KiviCache:
    return init_layer_cache(
        batch, capacity, kv_heads=heads, key_dim=dim, value_dim=dim, layout=layout, codec=codec
    )


def draw(batch, heads, tokens, dim, seed=0) -> Record:
    rng = np.random.default_rng(seed)
    return Record(*rng.normal(size=(2, batch, heads, tokens, dim)).astype(np.float32))


def fill(cache, record, lengths, splits) -> KiviCache:
    """Appends the first tokens of each row, each step as many as the next of `splits` says."""
    lengths, splits = np.array(lengths), cycle(splits)
    done = lengths * 0
    while (done < lengths).any():
        width = next(splits)
        count = np.minimum(width, lengths - done)
        padded = [np.full((*x.shape[:2], width, x.shape[3]), 7, np.float32) for x in record]
        for row, (start, n) in enumerate(zip(done, count, strict=True)):
            for new, x in zip(padded, record, strict=True):
                new[row, :, :n] = x[row, :, start : start + n]
        cache = append(cache, Record(*padded), count)
        done += count
    return cache


def tokens_of(cache, row) -> dict[int, tuple[int, np.ndarray, np.ndarray]]:
    """Slot, key and value (K, H) of each position that a row's blocks hold, each once."""
    found = {}
    for i in range(int(cache.blocks())):
        k, v, pos = map(np.asarray, read_block(cache, i))
        for j in np.flatnonzero(pos[row, 0] >= 0):
            position = int(pos[row, 0, j])
            assert position not in found
            found[position] = int(cache.first_slot(i)) + j, k[row, :, j], v[row, :, j]
    assert sorted(found) == list(range(int(cache.n[row])))
    return found


def live(cache, row) -> dict[str, np.ndarray]:
    """What a row's tokens left behind: its groups of codes, and its exact tokens in order."""
    codec, n = cache.codec, int(cache.n[row])
    groups = int(codec.encoded(n)) // codec.group
    slots = np.arange(groups * codec.group, n) % codec.residual
    found = {}
    for name, leaf in cache.leaves.items():
        if name.endswith("_exact"):
            found[name] = np.asarray(leaf[row][:, slots])
        elif cache.page_table is None:
            found[name] = np.asarray(leaf[row][:, :groups])
        else:
            pages = np.asarray(leaf)[np.asarray(cache.page_table[row])]
            in_line = np.moveaxis(pages, 1, 0).reshape(leaf.shape[1], -1, *leaf.shape[3:])
            found[name] = in_line[:, :groups]
    return found


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
