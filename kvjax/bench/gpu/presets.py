"""What `scripts/bench_gpu.py` checks and measures: shapes of decode attention, as data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvjax.bench.gpu.shape import DecodeShape

# The article's sweep: 8 query heads of 128 over 32 rows of 16K tokens, and over 64 of 64K.
ARTICLE = DecodeShape(32, 8, 8, 128, 16384)
ARTICLE_LONG = replace(ARTICLE, batch=64, length=65536)
LLAMA_8B = DecodeShape(32, 32, 8, 128, 8192)
LLAMA_70B = replace(LLAMA_8B, query_heads=64)
DEEPSEEK = DecodeShape(32, 128, 1, 512, 8192, rope_dim=64)

GROUPS = (1, 2, 4, 8)
JAX_PEERS = ("kvjax", "kvjax xla", "jax cudnn", "jax triton")
TORCH_PEERS = ("kvjax", "torch sdpa", "torch flex")
PAGED_PEERS = ("kvjax", "flashinfer")
# Sweeps that are run in a process of their own, beside torch.
TORCH = "torch"

# With `quick`, no batch, cache or window is larger.
QUICK_BATCH, QUICK_SLOTS = 2, 256


@dataclass(frozen=True)
class Point:
    """A shape that is timed.

    Attributes:
      sweep: what it is part of.
      shape: of the call.
      contenders: names of `peers`.
      copies: of the cache, one after the other; None for as many as exceed the L2 cache.
    """

    sweep: str
    shape: DecodeShape
    contenders: tuple[str, ...] = ("kvjax",)
    copies: int | None = None

    @property
    def name(self) -> str:
        copies = "" if self.copies is None else f" x{self.copies}"
        return f"{self.sweep}: {label(self.shape)}{copies}"


def label(shape: DecodeShape) -> str:
    """Everything that tells a shape from others, in one line."""
    width = f"L{shape.key_dim}+{shape.rope_dim}" if shape.rope_dim else f"H{shape.key_dim}"
    if shape.columns != shape.key_dim:
        width += f"/{shape.columns}"
    lengths = f"{shape.length}" if isinstance(shape.length, int) else f"ragged/{shape.slots}"
    extras = {
        f"{shape.scales} scales": shape.scales,
        f"pages {shape.page_size}": shape.page_size,
        f"window {shape.window}": shape.window,
        f"cap {shape.soft_cap}": shape.soft_cap,
        "sinks": shape.sinks,
        f"q {shape.query}": shape.query != "bf16",
    }
    parts = [f"B{shape.batch} N{shape.query_heads} K{shape.kv_heads} {width}", lengths, shape.codec]
    return " ".join([*parts, *(text for text, there in extras.items() if there)])


def kernel(shape: DecodeShape) -> str:
    """Which of the library's kernels serves a shape: what a failed check makes doubtful."""
    parts = (shape.codec, f"{shape.scales} scales" if shape.scales else "")
    kinds = ("pages" if shape.page_size else "", "latents" if shape.rope_dim else "")
    return ", ".join(part for part in (*parts, *kinds) if part)


def points() -> list[Point]:
    """All that is timed, the most important first."""
    return [
        *(Point("article", shape) for shape in _grouped(ARTICLE)),
        *(Point("fewer bytes", shape) for shape in _fewer_bytes()),
        Point("fewer bytes", ARTICLE, copies=2),
        *(Point("llama", shape) for shape in _llama()),
        *(Point("codecs", shape) for shape in _codecs()),
        *(Point("pages", replace(LLAMA_8B, page_size=size)) for size in (16, 64, 128)),
        Point("pages", replace(LLAMA_8B, page_size=64, codec="fp8_e4m3", scales="head")),
        *(Point("latents", shape) for shape in _latents()),
        *(Point("article, long", shape) for shape in _grouped(ARTICLE_LONG)),
        *(Point("peers", shape, JAX_PEERS) for shape in _against_peers()),
        *(
            Point("head dims", replace(ARTICLE, kv_heads=1, key_dim=dim))
            for dim in (64, 96, 128, 192, 256)
        ),
        *(
            Point("batch", replace(ARTICLE, batch=batch, kv_heads=heads))
            for heads in (8, 1)
            for batch in (1, 8, 128, 512)
        ),
        *(Point("one row", shape) for shape in _grouped(replace(ARTICLE, batch=1, length=131072))),
        *(Point(TORCH, shape, TORCH_PEERS) for shape in _against_peers()),
        *(Point(TORCH, replace(LLAMA_8B, page_size=size), PAGED_PEERS) for size in (16, 64)),
    ]


def _grouped(shape: DecodeShape) -> Iterator[DecodeShape]:
    for group in GROUPS:
        yield replace(shape, kv_heads=shape.query_heads // group)


def _fewer_bytes() -> Iterator[DecodeShape]:
    """A half, a quarter and an eighth of the article's bytes without fewer KV heads."""
    codes = replace(ARTICLE, codec="fp8_e4m3", scales="head")
    yield from (replace(ARTICLE, window=ARTICLE.slots // times) for times in (2, 4, 8))
    yield from (codes, replace(codes, codec="int8"))
    yield from (replace(codes, window=ARTICLE.slots // times) for times in (2, 4))


def _llama() -> Iterator[DecodeShape]:
    for model in (LLAMA_8B, LLAMA_70B):
        for batch, length in ((1, 8192), (8, 8192), (32, 8192), (128, 2048), (8, 32768)):
            yield replace(model, batch=batch, length=length)
    draw = random.Random(0)
    ragged = tuple(draw.randint(1, 16384) for _ in range(32))
    yield replace(LLAMA_8B, length=ragged, capacity=16384)


def _codecs() -> Iterator[DecodeShape]:
    for codec in ("fp8_e4m3", "int8"):
        for scales in ("head", "token"):
            yield replace(LLAMA_8B, codec=codec, scales=scales)
    yield replace(ARTICLE, kv_heads=1, codec="fp8_e4m3", scales="head")
    yield replace(ARTICLE, kv_heads=1, codec="int8", scales="token")


def _latents() -> Iterator[DecodeShape]:
    for heads in (128, 16):
        for batch, length in ((1, 65536), (32, 8192), (128, 4096)):
            yield replace(DEEPSEEK, query_heads=heads, batch=batch, length=length)
    yield replace(DEEPSEEK, page_size=64)


def _against_peers() -> Iterator[DecodeShape]:
    yield from (replace(ARTICLE, kv_heads=heads) for heads in (8, 1))
    yield LLAMA_8B
    yield replace(LLAMA_8B, batch=1, length=131072)


def checks(slots: int) -> dict[str, DecodeShape]:
    """What must agree with float64, by name, in caches of some `slots` slots (at least 192).

    Rows have no live slot, one, a few over half, and nearly all of them.
    """
    ragged = (0, 1, slots // 2 + 1, slots - 3)
    by_head = tuple(zip(ragged, reversed(ragged), strict=True))
    base = DecodeShape(4, 8, 2, 128, ragged)
    paged = replace(base, page_size=16)
    latent = replace(base, query_heads=16, kv_heads=1, key_dim=512, rope_dim=64)
    some = {
        **{f"group {g}": replace(base, query_heads=2 * g) for g in (1, 2, 4, 8, 16)},
        **{f"group {g}": replace(base, query_heads=g, kv_heads=1) for g in (64, 71)},
        **{f"head dim {dim}": replace(base, key_dim=dim) for dim in (64, 80, 96, 192, 256)},
        "narrower values": replace(base, key_dim=192, value_dim=128),
        "wider values": replace(base, key_dim=64, value_dim=128),
        "f16": replace(base, codec="f16", query="f16"),
        **{f"window {size}": replace(base, window=size) for size in (1, 64, 100)},
        "soft cap": replace(base, soft_cap=10.0),
        "sinks": replace(base, sinks=True),
        "sinks and window": replace(base, query_heads=16, key_dim=64, sinks=True, window=128),
        "soft cap and window": replace(base, query_heads=4, key_dim=256, soft_cap=10.0, window=70),
        "nothing live": replace(base, length=0, capacity=slots),
        "all live": replace(base, length=slots),
        "much room": replace(base, capacity=8 * slots),
        "lengths of heads": replace(base, length=by_head),
        "one long row": replace(base, batch=1, length=8 * slots - 5, kv_heads=1),
        "many short rows": replace(base, batch=16, length=70, kv_heads=1),
    }
    pages = {
        **{f"pages of {size}": replace(base, page_size=size) for size in (8, 16, 32, 64, 128)},
        "pages and window": replace(paged, window=100),
        "pages and sinks": replace(paged, sinks=True),
        "pages, lengths of heads": replace(paged, length=by_head),
        "pages, head dim 256": replace(paged, key_dim=256, page_size=64),
        "pages, one long row": replace(paged, batch=1, length=8 * slots - 5, kv_heads=1),
    }
    codes = {
        f"{codec}, {scales} scales": replace(base, codec=codec, scales=scales)
        for codec in ("fp8_e4m3", "fp8_e5m2", "int8")
        for scales in ("tensor", "head", "token")
    }
    token, head = codes["fp8_e4m3, token scales"], codes["int8, head scales"]
    codes |= {
        "fp8_e4m3, f16 queries": replace(token, query="f16"),
        "fp8_e4m3, head dim 64": replace(token, key_dim=64),
        "fp8_e4m3, head dim 256": replace(token, key_dim=256, query_heads=2),
        "fp8_e4m3, pages of 16": replace(token, page_size=16),
        "fp8_e4m3, group 16": replace(token, query_heads=32),
        "fp8_e4m3, head scales, pages of 64": replace(token, scales="head", page_size=64),
        "int8, pages of 64": replace(head, page_size=64),
        "int8, token scales, pages of 128": replace(head, scales="token", page_size=128),
        "int8, window and soft cap": replace(head, scales="token", window=100, soft_cap=10.0),
    }
    latents = {
        **{f"latents, {heads} heads": replace(latent, query_heads=heads) for heads in (8, 16, 128)},
        **{f"latents, pages of {size}": replace(latent, page_size=size) for size in (16, 64)},
        "latents, window": replace(latent, window=100),
        "latents, one long row": replace(latent, batch=1, length=8 * slots - 5),
    }
    return some | pages | codes | latents


def quick(point: Point) -> Point:
    """The same at a tiny size."""
    shape = point.shape
    slots = min(shape.slots, QUICK_SLOTS)
    length: int | tuple[int, ...] = slots
    if isinstance(shape.length, tuple):
        length = tuple(min(n, slots) for n in shape.length[:QUICK_BATCH])
    window = None if shape.window is None else max(1, shape.window * slots // shape.slots)
    small = replace(
        shape, batch=min(shape.batch, QUICK_BATCH), length=length, capacity=slots, window=window
    )
    return replace(point, shape=small)
