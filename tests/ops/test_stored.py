"""Decode attention over pages and over 8-bit codes: the same as over the numbers in a row."""

from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
from quick import rest_slow

from kvjax.ops import decode_attention, latent_decode_attention

LENGTHS = np.array([0, 1, 7, 16, 24])
ROWS, KV_HEADS, SLOTS = len(LENGTHS), 2, 24
DEAD = np.arange(SLOTS) >= LENGTHS[:, None]
SCALES = {"all": (), "heads": (KV_HEADS,), "tokens": (ROWS, KV_HEADS, SLOTS)}


def in_pages(array, size, seed=0):
    """(B, K, S, ...) cut into pages, shuffled among unused ones that hold NaN or the like.

    Returns the pages (num_pages, K, P, ...) and their table, garbage behind each row's live ones.
    """
    a_row = SLOTS // size
    order = np.random.default_rng(seed).permutation(ROWS * a_row + 3)
    table = order[: ROWS * a_row].reshape(ROWS, a_row).astype(np.int32)
    worst = np.nan if np.issubdtype(array.dtype, np.floating) else 0
    pages = np.full((len(order), KV_HEADS, size, *array.shape[3:]), worst, array.dtype)
    cut = np.moveaxis(array.reshape(ROWS, KV_HEADS, a_row, size, *array.shape[3:]), 2, 1)
    pages[table] = cut
    for row, length in enumerate(LENGTHS):
        table[row, -(-length // size) :] = [-1, 999, 0][row % 3]
    return jnp.asarray(pages), jnp.asarray(table)


def numbers(draw):
    q, k, v = draw(ROWS, (6, KV_HEADS), SLOTS, (16, 8))
    dead = DEAD[:, None, :, None]
    return q, *(np.where(dead, np.nan, np.asarray(x)) for x in (k, v))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    ("size", "window"), rest_slow(product([1, 4, 12], [None, 5]), [(1, 5), (4, None), (12, 5)])
)
def test_pages(size, window, implementation, draw, assert_same):
    q, k, v = numbers(draw)
    settings = {"window": window, "sink_logits": jnp.linspace(-1, 1, 6), "return_lse": True}
    want = decode_attention(
        q, jnp.asarray(k), jnp.asarray(v), jnp.asarray(LENGTHS), implementation="xla", **settings
    )
    (k_pages, table), (v_pages, _) = in_pages(k, size), in_pages(v, size)
    got = decode_attention(
        q,
        k_pages,
        v_pages,
        jnp.asarray(LENGTHS),
        page_table=table,
        implementation=implementation,
        **settings,
    )
    assert_same(got, want)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    ("kind", "dtype", "size"),
    rest_slow(
        product(SCALES, ["int8", "float8_e4m3fn", "float8_e5m2"], [None, 4]),
        [
            *(("all", "float8_e5m2", None), ("heads", "float8_e4m3fn", 4)),
            *(("tokens", "int8", 4), ("tokens", "float8_e4m3fn", None)),
        ],
    ),
)
def test_codes(kind, dtype, size, implementation, draw, assert_same):
    """Codes times their scales, by hand, as numbers; NaN in the scales of dead tokens."""
    rng = np.random.default_rng(1)
    q, *_ = draw(ROWS, (6, KV_HEADS), SLOTS, (16, 8))
    codes = [
        np.asarray(jnp.asarray(rng.integers(-100, 100, (ROWS, KV_HEADS, SLOTS, dim)), dtype))
        for dim in (16, 8)
    ]
    scales = [rng.uniform(0.005, 0.02, SCALES[kind]).astype(np.float32) for _ in codes]
    whole = [
        code.astype(np.float32) * (scale[:, None, None] if kind == "heads" else scale[..., None])
        for code, scale in zip(codes, scales, strict=True)
    ]
    want = decode_attention(q, *map(jnp.asarray, whole), jnp.asarray(LENGTHS), return_lse=True)
    if kind == "tokens":
        scales = [np.where(DEAD[:, None], np.nan, scale) for scale in scales]
    table = None
    if size is not None:
        if kind == "tokens":
            scales = [in_pages(scale, size)[0] for scale in scales]
        codes, (table, _) = zip(*(in_pages(code, size) for code in codes), strict=True)
    got = decode_attention(
        q,
        *map(jnp.asarray, codes),
        jnp.asarray(LENGTHS),
        k_scale=jnp.asarray(scales[0]),
        v_scale=jnp.asarray(scales[1]),
        page_table=table,
        return_lse=True,
        implementation=implementation,
    )
    assert_same(got, want)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_latents_are_keys_and_values_of_one_head(window, paged, implementation, draw, assert_same):
    latent, rope = 16, 4
    q, k, _ = draw(ROWS, (6, KV_HEADS), SLOTS, (latent + rope, 8))
    k = np.where(DEAD[..., None], np.nan, np.asarray(k[:, 0]))
    settings = {"scale": 0.2, "window": window, "return_lse": True}
    lengths = jnp.asarray(LENGTHS)
    want = decode_attention(
        q, jnp.asarray(k[:, None]), jnp.asarray(k[:, None, :, :latent]), lengths, **settings
    )
    table = None
    if paged:
        pages, table = in_pages(np.repeat(k[:, None], KV_HEADS, axis=1), 4)
        k = pages[:, 0]
    got = latent_decode_attention(
        q[..., :latent],
        q[..., latent:],
        jnp.asarray(k[..., :latent]),
        jnp.asarray(k[..., latent:]),
        lengths,
        page_table=table,
        implementation=implementation,
        **settings,
    )
    assert_same(got, want)


BAD = {
    "an axis too many": ({"latent": (2, 1, 5, 8)}, "latent is float32[2, 1, 5, 8]; accepted are"),
    "ropes of other heads": ({"q_rope": (2, 3, 2)}, "q_rope is float32[2, 3, 2]; accepted beside"),
    "ropes of other slots": ({"k_rope": (2, 4, 2)}, "k_rope is float32[2, 4, 2]; accepted beside"),
    "another rank": ({"q_latent": (2, 4, 6)}, "accepted beside latent float32[2, 5, 8] are 8"),
    "another rope": ({"q_rope": (2, 4, 3)}, "accepted beside k_rope float32[2, 5, 2] are 2"),
    "more rows": ({"latent": (3, 5, 8), "k_rope": (3, 5, 2)}, "are 2 rows"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case):
    changed, message = BAD[case]
    shapes = {"q_latent": (2, 4, 8), "q_rope": (2, 4, 2), "latent": (2, 5, 8), "k_rope": (2, 5, 2)}
    arguments = {name: jnp.zeros(shape) for name, shape in (shapes | changed).items()}
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the message is compared
        latent_decode_attention(**arguments, lengths=jnp.array([5, 2]), scale=1.0)
    assert message in str(caught.value)
