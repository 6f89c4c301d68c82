"""When the kernel serves a call, why it does not, and that nobody falls back unawares."""

import warnings

import jax
import jax.numpy as jnp
import pytest

from kvjax.cache import init_layer_cache
from kvjax.ops import attend, decode, decode_attention, implementations, mosaic
from kvjax.ops.devices import Gpu, current_gpu
from kvjax.ops.stored import Stored

A100, L40, H100, B200, RTX = (
    Gpu(capability, 132) for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
)


def obstacle(
    gpu, dims=(128, 128), q="bfloat16", stored="bfloat16", slots=64, pages=None, rope=None
):
    lead = (2, 4, slots if pages is None else pages)
    arrays = [jax.ShapeDtypeStruct((*lead, dim), stored) for dim in dims]
    table = None if pages is None else jax.ShapeDtypeStruct((2, 8), jnp.int32)
    keys = (
        (arrays[0],) if rope is None else (arrays[0], jax.ShapeDtypeStruct((*lead, rope), stored))
    )
    cache = Stored(keys, arrays[1] if rope is None else None, table)
    query = jax.ShapeDtypeStruct((2, 8, dims[0] + (rope or 0)), q)
    return mosaic.obstacle(gpu, query, cache)


@pytest.mark.parametrize(
    ("gpu", "case"),
    [
        (H100, {}),
        (B200, {"q": "float16", "stored": "float16"}),
        (H100, {"dims": (80, 80)}),
        (H100, {"dims": (192, 128)}),
        (H100, {"dims": (256, 256), "pages": 8}),
        (H100, {"stored": "float8_e4m3fn"}),
        (H100, {"stored": "float8_e5m2", "q": "float16"}),
        (B200, {"stored": "int8", "dims": (96, 96)}),
        (A100, {"stored": "int8", "q": "bfloat16"}),
        (A100, {"pages": 16}),
        (L40, {"stored": "float8_e4m3fn"}),
        (H100, {"dims": (512, 0), "rope": 64}),
    ],
    ids=str,
)
def test_it_serves(gpu, case):
    assert obstacle(gpu, **case) is None


@pytest.mark.parametrize(
    ("gpu", "case", "reason"),
    [
        (None, {}, "an NVIDIA GPU, or interpret=True"),
        (RTX, {}, "not 12.0"),
        (H100, {"q": "float32"}, "it takes q in bf16 or f16, not in float32"),
        (
            H100,
            {"stored": "float32"},
            "beside q in bfloat16 it takes k and v in bfloat16, float8_e4m3fn, float8_e5m2, int8 "
            "on this GPU, not in float32",
        ),
        (H100, {"stored": "float16"}, "not in float16"),
        (A100, {"stored": "float8_e4m3fn"}, "k and v in bfloat16, int8 on this GPU"),
        (A100, {"dims": (512, 0), "rope": 64}, "no latents before compute capability 9.0"),
        (A100, {"slots": 40}, "rows of 64 slots and more, not 40"),
        (A100, {"dims": (80, 80), "pages": 16}, "pages of 16 slots are too small"),
        (L40, {"stored": "int8", "dims": (256, 256)}, "no room for 8-bit caches beyond 192"),
        (H100, {"dims": (72, 72)}, "multiples of 16 up to 256, not [72, 72]"),
        (H100, {"dims": (512, 512)}, "up to 256, not [512, 512]"),
        (H100, {"dims": (80, 80), "stored": "int8"}, "multiples of 32 up to 256"),
        (H100, {"dims": (64, 32)}, "values of 64 columns and more, not 32"),
        (H100, {"slots": 100}, "capacities in multiples of 8 slots, not 100"),
        (H100, {"pages": 4}, "pages in multiples of 8 slots, not of 4"),
    ],
    ids=str,
)
def test_it_does_not_serve(gpu, case, reason):
    assert reason in obstacle(gpu, **case)


@pytest.fixture
def on_h100(monkeypatch):
    """The choice of implementations sees an H100, though what runs here is a CPU."""
    implementations.warn_once.cache_clear()
    monkeypatch.setattr(decode, "current_gpu", lambda: H100)


@pytest.mark.usefixtures("on_h100")
def test_a_gpu_gets_the_kernel(monkeypatch, draw):
    called = []

    def stand_in(q, stored, lengths, sinks, rule, *, gpu, interpret):
        called.append((gpu, interpret))
        return jnp.zeros(q.shape), jnp.zeros(q.shape[:2])

    monkeypatch.setattr(mosaic, "decode", stand_in)
    monkeypatch.setitem(decode.IMPLEMENTATIONS, "mosaic_gpu", stand_in)
    inputs = draw(1, (8, 2), 64, (64, 64), dtype="bfloat16")
    decode_attention(*inputs, jnp.array([3]))
    assert called == [(H100, False)]


@pytest.mark.usefixtures("on_h100")
def test_a_gpu_never_falls_back_silently(draw):
    inputs = draw(1, (8, 2), 64, (64, 64), dtype="float32")
    with pytest.warns(UserWarning, match="'xla' and not as 'mosaic_gpu': it takes q in bf16"):
        decode_attention(*inputs, jnp.array([3]))
    with warnings.catch_warnings(action="error"):
        decode_attention(*inputs, jnp.array([3]))  # said once
        decode_attention(*inputs, jnp.array([3]), implementation="xla")  # asked for


@pytest.mark.parametrize(("codec", "tokens", "warns"), [("int4", 1, True), ("int4", 2, False)])
def test_a_cache_that_no_kernel_reads_is_told_of(codec, tokens, warns, monkeypatch, draw):
    """Decoding a token over it; chunks have no kernel at all."""
    implementations.warn_once.cache_clear()
    monkeypatch.setitem(attend.__globals__, "current_gpu", lambda: H100)
    cache = init_layer_cache(1, 64, kv_heads=2, key_dim=64, value_dim=64, codec=codec)
    q, *_ = draw(1, (8, 2), 64, (64, 64), tokens=tokens)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attend(q, cache, jnp.arange(tokens)[None])
    assert any("no kernel reads a SlotCache" in str(said.message) for said in caught) == warns


def test_a_cpu_falls_back_without_a_word(draw):
    with warnings.catch_warnings(action="error"):
        decode_attention(*draw(1, (8, 2), 64, (64, 64)), jnp.array([3]))


def test_no_gpu_here():
    assert current_gpu() is None
