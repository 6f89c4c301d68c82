"""The compiled step of a model of several layers: its memory, and its loops.

Nothing is allocated: the steps are compiled for shapes. Absolute temporaries mislead, since XLA
on CPU keeps some for the weights, so they are compared between two capacities and two values of
N/K.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.cache import Cache, CodecChoice, LayoutChoice, Paged, SinkRing
from kvjax.nn import (
    AttentionConfig,
    Decoder,
    DecoderConfig,
    LatentAttentionConfig,
    MlpConfig,
    Rope,
    TensorProductAttentionConfig,
    TiedAttentionConfig,
    share,
)
from kvjax.nn.sharing import AnyAttentionConfig

SLACK = 64 * 1024
SHORT, LONG = 8 * 1024, 64 * 1024
LAYERS, KV_HEADS, HEAD_DIM, VOCAB, BLOCK, D_MODEL = 4, 2, 32, 64, 512, 64
# The layer between reader and producer writes while the cache of the first waits.
SHARING = (0, 1, 0, 1)


# Of a layout with so many slots a row; what replaces old tokens gets rows of four times as many.
LAYOUTS: dict[str, Callable[[int], LayoutChoice]] = {
    "dense": lambda slots: "dense",
    "pages": lambda slots: Paged(64),
    "ring": lambda slots: "ring",
    "sinks": lambda slots: SinkRing(4, slots - 4),
    "reindexed sinks": lambda slots: SinkRing(4, slots - 4, reindexed=True),
    "kept": lambda slots: "dense",
    "kept by each head": lambda slots: "dense",
}


# What a token leaves behind, by the module of so many query heads, and of a window.
RECORDS: dict[str, Callable[[int, int | None], AnyAttentionConfig]] = {
    "heads": lambda heads, window: AttentionConfig(
        d_model=D_MODEL,
        query_heads=heads,
        kv_heads=KV_HEADS,
        key_dim=HEAD_DIM,
        value_dim=HEAD_DIM,
        rope=Rope(HEAD_DIM),
        window=window,
    ),
    "latent": lambda heads, window: LatentAttentionConfig(
        d_model=D_MODEL,
        query_heads=heads,
        latent_rank=2 * HEAD_DIM,
        rope_dim=HEAD_DIM // 2,
        head_dim=HEAD_DIM,
        head_value_dim=HEAD_DIM,
        rope=Rope(HEAD_DIM // 2),
        window=window,
    ),
    "several latents": lambda heads, window: LatentAttentionConfig(
        d_model=D_MODEL,
        query_heads=heads,
        latent_rank=HEAD_DIM,
        rope_dim=HEAD_DIM // 2,
        head_dim=HEAD_DIM,
        head_value_dim=HEAD_DIM,
        rope=Rope(HEAD_DIM // 2),
        window=window,
        latents=2,
    ),
    "tied": lambda heads, window: TiedAttentionConfig(
        d_model=D_MODEL,
        query_heads=heads,
        tied_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rope=Rope(HEAD_DIM // 2),
        window=window,
    ),
    "factors": lambda heads, window: TensorProductAttentionConfig(
        d_model=D_MODEL,
        query_heads=heads,
        head_dim=HEAD_DIM,
        key_rank=2,
        value_rank=2,
        query_rank=2,
        rope=Rope(HEAD_DIM),
        window=window,
    ),
}


class Step(NamedTuple):
    """What is compiled: a step of T tokens for one row of `capacity` slots, with N query heads.

    `producers`: the layers whose keys and values the layers read. `layout`: one of `LAYOUTS`.
    `record`: one of `RECORDS`.
    """

    tokens: int
    capacity: int = SHORT
    codec: CodecChoice = "f32"
    query_heads: int = 8
    producers: tuple[int, ...] = tuple(range(LAYERS))
    layout: str = "dense"
    record: str = "heads"

    @property
    def score_bytes(self) -> int:
        """Of the new tokens against one block; with it attention's activations grow."""
        return self.query_heads * self.tokens * BLOCK * 4


class Memory(NamedTuple):
    """Bytes, as XLA reports them of a compiled step."""

    cache: int
    alias: int
    output: int
    temp: int
    logits: int


def shapes(step: Step) -> tuple:
    """The arguments of a step, as shapes."""
    window = step.capacity if step.layout == "ring" else None
    layers = (RECORDS[step.record](step.query_heads, window),) * len(step.producers)
    if step.record == "heads":
        layers = share(layers, step.producers)
    decoder = DecoderConfig(VOCAB, D_MODEL, attention=layers, mlp=MlpConfig(96))
    model = nnx.eval_shape(lambda: Decoder(decoder, rngs=nnx.Rngs(0)))
    empty = jax.eval_shape(lambda: cache_of(model, step))
    tokens, count = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1, step.tokens), (1,)))
    return model, tokens, empty, count


def cache_of(model: Decoder, step: Step) -> Cache:
    slots = step.capacity
    turns = step.layout == "ring" or step.layout.endswith("sinks")
    layout = LAYOUTS[step.layout](slots)
    empty = model.init_cache(1, 4 * slots if turns else slots, layout, step.codec)
    if not step.layout.startswith("kept"):
        return empty
    heads = KV_HEADS if step.layout == "kept by each head" else 1
    every = jnp.broadcast_to(jnp.arange(slots), (1, heads, slots))
    return Cache(tuple(layer.keep(every) for layer in empty.layers))


@cache
def compiled(function: Callable, step: Step) -> jax.stages.Compiled:
    return function.lower(*shapes(step)).compile()


def measure(function: Callable, step: Step) -> Memory:
    arguments = shapes(step)
    found = compiled(function, step).memory_analysis()
    logits = jax.eval_shape(function, *arguments)[0]
    return Memory(
        cache=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments[2])),
        alias=found.alias_size_in_bytes,
        output=found.output_size_in_bytes,
        temp=found.temp_size_in_bytes,
        logits=logits.size * 4,
    )


def assert_in_place(memory: Memory) -> None:
    """Law 4: the cache is handed through, and beside it only logits come out."""
    assert memory.alias == memory.cache
    assert memory.output - memory.alias <= memory.logits + SLACK


def growth_with_capacity(function: Callable, step: Step) -> int:
    """Bytes of temporaries that a longer cache adds."""
    longer = step._replace(capacity=LONG)
    return measure(function, longer).temp - measure(function, step).temp


def growth_with_group(function: Callable, step: Step) -> int:
    """Bytes of temporaries that a larger N/K adds, beside some copies of one block's scores."""
    larger = step._replace(query_heads=4 * step.query_heads)
    scores = larger.score_bytes - step.score_bytes
    return measure(function, larger).temp - measure(function, step).temp - 4 * scores


def donated() -> Callable:
    """`decode`, to be compiled anew in a changed world."""
    return jax.jit(lambda model, *rest: step_of(model, *rest), donate_argnums=2)


def step_of(model, tokens, cache, count):
    return model(tokens, cache, count=count)


def assert_loops_follow_the_length(text: str, layers: int = LAYERS) -> None:
    """Law 4: each layer has a loop, and the compiler knows of none how often it runs."""
    loops = [line for line in text.splitlines() if re.search(r" while\(", line)]
    assert len(loops) >= layers
    assert not any("known_trip_count" in line for line in loops)


NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int8": "s8", "uint8": "u8"}


def assert_only_tokens_are_written(text: str, step: Step) -> None:
    """Law 4: nothing but a scatter makes a new array of the shape of one of the cache's.

    Of arrays that grow with the capacity: KIVI's residual does not.
    """
    written: set[str] = set()
    either = (shapes(s)[2] for s in (step, step._replace(capacity=LONG)))
    for leaf, longer in zip(*map(jax.tree.leaves, either), strict=True):
        if leaf.size < step.capacity or leaf.shape == longer.shape:
            continue
        dtype = NAMES.get(leaf.dtype.name, leaf.dtype.name.replace("float8_", "f8"))
        shape = re.escape(f"{dtype}[{','.join(map(str, leaf.shape))}]")
        made = set(re.findall(rf"= {shape}\S* ([a-z-]+)\(", text))
        handed_on = {"parameter", "get-tuple-element", "bitcast", "opt-barrier", "fusion"}
        assert made - handed_on <= {"scatter", "dynamic-update-slice"}, shape
        written |= made & {"scatter", "dynamic-update-slice"}
    assert written
