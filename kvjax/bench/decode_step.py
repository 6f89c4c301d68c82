"""Whole decode steps of models: `engine.decode` on caches filled to a given length."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax import engine, models, sizing
from kvjax.bench import machine, result
from kvjax.bench.bandwidth import ARRAY_BYTES, Bandwidth, probes
from kvjax.bench.case import check_sizes
from kvjax.bench.timing import interleave, time_calls
from kvjax.cache import Cache, Record
from kvjax.cache.codecs import DTYPES, build_codec, plain_codec
from kvjax.nn import Decoder

# At one byte and one FLOP a second, the seconds of a floor are its bytes and its FLOP.
_UNIT = sizing.Chip("unit", 0, 1.0, 1.0, None, "by definition")


@dataclass(frozen=True)
class StepCase:
    """B rows of `length` tokens, the newest included, in caches of `capacity` slots a row."""

    model: str
    batch: int
    length: int
    capacity: int
    codec: str

    def __post_init__(self) -> None:
        check_sizes(self.batch, self.length, self.capacity)
        object.__setattr__(self, "codec", build_codec(self.codec).name)


class Steps:
    """A sampler of decode steps.

    Each step decodes token number `length` of every row and is waited for, as `engine.generate`
    does to look at its tokens. The cache is rolled back outside the clock.
    """

    def __init__(self, model: Decoder, case: StepCase, seed: int = 0):
        self._model = model
        self._cache = filled_cache(model, case, seed)
        self._tokens = jnp.zeros((case.batch, 1), jnp.int32)
        self._count = jnp.ones((case.batch,), jnp.int32)

    def __call__(self, calls: int) -> float:
        seconds = 0.0
        for _ in range(calls):
            seconds += time_calls(self._step, 1)
            self._cache.check()
            self._cache = self._cache.rollback(1)
        return seconds

    def _step(self) -> Array:
        logits, self._cache = engine.decode(self._model, self._tokens, self._cache, self._count)
        return logits


def filled_cache(model: Decoder, case: StepCase, seed: int = 0) -> Cache:
    """A cache of random records of all tokens but the newest."""
    cache = model.init_cache(case.batch, case.capacity, codec=case.codec)
    older = case.length - 1
    count = jnp.full((case.batch,), older, jnp.int32)
    draw = np.random.default_rng(seed)
    layers = []
    for layer, i in zip(cache.layers, model.config.cached, strict=True):
        config = model.config.attention[i]
        k, v = (
            draw.standard_normal((case.batch, heads, older, dim), np.float32)
            for heads, dim in (
                (config.kv_heads, config.key_dim),
                (config.value_heads, config.value_dim),
            )
        )
        layers.append(layer.append(Record(jnp.asarray(k), jnp.asarray(v)), count))
    return Cache(tuple(layers))


def read_model(source: str, dtype: str | None = None) -> Decoder:
    """A model directory, or a config.json alone: then with random weights, f32 unless said."""
    if Path(source).suffix != ".json":
        return models.load(source, dtype)
    config, codec = sizing.read_config(source), plain_codec(dtype or "f32")
    parameters = sizing.load(config).parameters
    machine.check_memory(parameters * sizing.codec(codec).itemsize, f"the weights of {source}")
    return models.init(config, dtype=codec)


def measure(
    decoders: Mapping[str, Decoder],
    *,
    batch: Sequence[int],
    length: Sequence[int],
    capacity: int | None = None,
    codec: Sequence[str] = ("bf16",),
    rounds: int = 7,
    seed: int = 0,
    array_bytes: int = ARRAY_BYTES,
    on_round: Callable[[int], Any] | None = None,
) -> dict[str, Any]:
    """Time the decode step of each model at all combinations, all in turn in each round.

    Args:
      decoders: models by the names that they get in the result.
      batch, length, codec: rows, live tokens a row with the newest, and codecs of the cache.
      capacity: slots a row; None for as many as live tokens.
      rounds: samples of each.
      seed: of the orders and the records.
      array_bytes: size of the arrays that the machine's bandwidth is measured on.
      on_round: called with 1 after each round.

    Returns:
      As `result.collect`. Bytes and FLOP of a row are those of `ModelSpec.decode_floor`: weights
      and live cache, read once.

    Raises:
      ValueError: for sizes that a model or the memory cannot hold.
    """
    cases = [
        StepCase(name, rows, live, live if capacity is None else capacity, codec_name)
        for name, codec_name, rows, live in product(decoders, codec, batch, length)
    ]
    specs = {name: sizing.load(json.loads(d.config.source)) for name, d in decoders.items()}
    needed = sum(
        specs[case.model].cache_bytes(case.capacity, case.batch, case.codec).allocated
        for case in cases
    )
    machine.check_memory(needed + 3 * array_bytes, "the caches of all cases")
    moves = probes(array_bytes)
    steps = {case: Steps(decoders[case.model], case, seed) for case in cases}
    timings = interleave({**steps, **moves}, rounds, seed=seed, on_round=on_round)
    bandwidth = Bandwidth.of(moves, timings)
    rows = []
    for case in cases:
        spec, weights = specs[case.model], weight_codec(decoders[case.model])
        floor = spec.decode_floor(
            _UNIT, case.length, case.batch, codec=case.codec, weight_codec=weights
        )
        nbytes, flop = int(floor.ceilings["memory"]), int(floor.ceilings["matrix"])
        shape = asdict(case) | {"weight_codec": weights, "kv_heads": _kv_heads(spec)}
        rows.append(result.row("kvjax", shape, nbytes, flop, timings[case], bandwidth))
    return result.collect("decode step", rows, bandwidth, {"rounds": rounds, "seed": seed})


def _kv_heads(spec: sizing.ModelSpec) -> int | None:
    """K, or None where layers differ."""
    kv_heads = {layer.kv_heads for layer in spec.layers}
    return kv_heads.pop() if len(kv_heads) == 1 else None


def weight_codec(decoder: Decoder) -> str:
    """How the weights are stored: f32, bf16 or f16."""
    dtype = decoder.embed.embedding.dtype
    return next(name for name, candidate in DTYPES.items() if candidate == dtype)
