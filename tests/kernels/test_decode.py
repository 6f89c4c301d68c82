"""The decode kernel, as a simulation with races looked for, against float64.

On sm_90a products are `wgmma`, whose reads the race detector does not see; on sm_100a they are
`mma.sync`, simulated by ordinary reads, which it does. Both run the same code otherwise.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import rest_slow

from kernels.conftest import accuracy
from kvjax.bench.gpu.shape import DecodeShape, attend, operands, queries

HOPPER, BLACKWELL, AMPERE, ADA = (9, 0), (10, 0), (8, 0), (8, 9)
BASE = DecodeShape(batch=2, query_heads=8, kv_heads=2, key_dim=64, length=(200, 65))
ONE_HEAD = DecodeShape(batch=1, query_heads=4, kv_heads=1, key_dim=64, length=(130,))
LENGTHS = {
    f"length {n}": replace(BASE, length=(n, 130), capacity=256) for n in (0, 1, 63, 64, 65, 256)
}
LENGTHS |= {
    "no row lives": replace(BASE, length=(0, 0), capacity=128),
    "capacity of no whole tiles": replace(BASE, length=(200, 199), capacity=200),
    "capacity below a tile": replace(BASE, length=(40, 7), capacity=40),
    "each head has its own": replace(BASE, length=((200, 1), (0, 64)), capacity=256),
}
GROUPS = {
    f"group {g}": replace(ONE_HEAD, query_heads=g, capacity=192) for g in (1, 3, 4, 7, 8, 16, 71)
}
WIDTHS = {
    f"dims {h}, {hv}": replace(ONE_HEAD, key_dim=h, value_dim=hv)
    for h, hv in [(80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (64, 112), (16, 64)]
}
PAGES = {f"pages of {p}": replace(BASE, page_size=p) for p in (8, 16, 24, 64, 128)}
WINDOWS = {
    f"window {w}": replace(BASE, length=(200, 65), capacity=256, window=w) for w in (1, 64, 70, 500)
}
WINDOWS["window 70 in pages of 16"] = replace(BASE, window=70, page_size=16)
SCORES = {
    "cap": replace(BASE, soft_cap=5.0),
    "sinks": replace(BASE, sinks=True, length=(200, 0)),
    "all": replace(
        BASE, soft_cap=5.0, sinks=True, window=100, page_size=64, query="f16", codec="f16"
    ),
    "f16": replace(BASE, query="f16", codec="f16"),
}
CODES = {
    f"{codec}, {scales}": replace(BASE, codec=codec, scales=scales, query=query)
    for codec, scales, query in [
        ("fp8_e4m3", "tensor", "bf16"),
        ("fp8_e4m3", "head", "f16"),
        ("fp8_e4m3", "token", "bf16"),
        ("fp8_e5m2", "tensor", "f16"),
        ("int8", "head", "bf16"),
        ("int8", "token", "bf16"),
    ]
}
CODES |= {
    "int8, token, pages of 16": replace(BASE, codec="int8", scales="token", page_size=16),
    "fp8_e4m3, token, cap and window": replace(
        BASE, codec="fp8_e4m3", scales="token", soft_cap=5.0, window=65, capacity=256
    ),
    "int8, token, dims 128": replace(ONE_HEAD, codec="int8", scales="token", key_dim=128),
    "int8, token, dims 96": replace(ONE_HEAD, codec="int8", scales="token", key_dim=96),
    "fp8_e4m3, head, dims 256": replace(ONE_HEAD, codec="fp8_e4m3", scales="head", key_dim=256),
}
LATENT = DecodeShape(2, 16, 1, key_dim=512, rope_dim=64, length=(130, 64))
LATENTS = {
    "latents, 16 heads": LATENT,
    "latents, 40 heads": replace(LATENT, query_heads=40),
    "latents, 128 heads": replace(LATENT, query_heads=128, window=100),
    "latents in pages, 5 heads": replace(LATENT, query_heads=5, page_size=16),
}
CASES = LENGTHS | GROUPS | WIDTHS | PAGES | WINDOWS | SCORES | CODES | LATENTS


def on_both(names):
    """Each name with one of the GPUs, in turn; both for what is short."""
    return [(name, (HOPPER, BLACKWELL)[i % 2]) for i, name in enumerate(names)]


# What differs most from the others, of each kind.
QUICK = (
    *("length 0", "length 64", "length 256", "no row lives", "capacity of no whole tiles"),
    *("each head has its own", "group 1", "group 7", "group 71", "dims 80, 80", "dims 192, 128"),
    *("dims 64, 112", "pages of 8", "pages of 24", "window 1", "window 70 in pages of 16", "all"),
    *("fp8_e4m3, tensor", "fp8_e4m3, token, cap and window", "int8, head"),
    *("int8, token, pages of 16", "int8, token, dims 96", "latents, 40 heads"),
    "latents in pages, 5 heads",
)


@pytest.mark.parametrize(
    ("name", "capability"),
    rest_slow(on_both(CASES), [case for case in on_both(CASES) if case[0] in QUICK]),
)
def test_it_is_attention(name, capability, simulate):
    assert simulate(CASES[name], capability).within(accuracy(CASES[name]))


def test_a_length_beyond_the_capacity_is_the_capacity():
    """What nobody can check inside jit reads no memory behind the cache."""
    whole = replace(ONE_HEAD, length=(128,), capacity=128)
    q, arrays = queries(whole), operands(whole)
    got, want = (
        jax.jit(lambda n: attend(whole, q, arrays | {"lengths": n}, interpret=True))(jnp.array([n]))
        for n in (500, 128)
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("multiprocessors", [1, 16])
@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL, AMPERE, ADA])
@pytest.mark.parametrize("name", CASES)
def test_it_is_attention_on_every_gpu(name, capability, multiprocessors, simulate):
    """Or refused with a reason, on GPUs that are not served whole."""
    try:
        found = simulate(CASES[name], capability, multiprocessors)
    except ValueError as refusal:
        if capability in (HOPPER, BLACKWELL) or "accepted here are" not in str(refusal):
            raise
        pytest.skip(str(refusal))
    assert found.within(accuracy(CASES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("page_size", [None, 16, 64, 128])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_the_whole_product(window, page_size, dims, group, capability, simulate):
    shape = DecodeShape(
        batch=2,
        query_heads=2 * group,
        kv_heads=2,
        key_dim=dims[0],
        value_dim=dims[1],
        length=(193, 64),
        page_size=page_size,
        window=window,
    )
    assert simulate(shape, capability).within(accuracy(shape))
