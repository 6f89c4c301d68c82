"""Feeds a model tokens with a cache, and looks at what the cache holds."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from hf_family_overrides import ALL_TOKENS, CHANNELS, MODULE_STATES, ROWS, VECTORS
from hf_tiny_configs import attribute, decoder_config
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPooling

PROMPT, STEPS, SOURCE = 24, 5, 17
KV = ("keys", "values", "indexer_keys")
TABLES = ("indexer_position_ids",)  # positions, not counted
# Where a model takes its cache, and where it returns it.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside `value`, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors(item, f"{path}[{key}]" if path else f".{key}")


Layer = tuple[str, list[tuple[str, Tensor]]]


def held(cache: Any) -> list[Layer]:
    """Layer by layer: the layer's class, and its tensors by name."""
    if isinstance(cache, EncoderDecoderCache):
        cross = [("cross " + cls, found) for cls, found in held(cache.cross_attention_cache)]
        return held(cache.self_attention_cache) + cross
    if not isinstance(cache, Cache):
        return [named(type(cache).__name__, vars(cache) if hasattr(cache, "__dict__") else cache)]
    rest = {name: value for name, value in vars(cache).items() if name != "layers"}
    layers = [named(type(layer).__name__, vars(layer)) for layer in cache.layers]
    beside = named(type(cache).__name__, rest)
    return layers + [beside] * bool(beside[1])


def named(cls: str, attributes: Any) -> Layer:
    found = [(path.removeprefix("."), tensor) for path, tensor in tensors(attributes)]
    return cls, [(n, t) for n, t in found if t.dim() > 1 and t.numel() and n not in TABLES]


def totals(cache: Any) -> tuple[int, int]:
    """Bytes of keys and values, and of all the rest."""
    kv = state = 0
    for _, named in held(cache):
        for name, tensor in named:
            size = tensor.numel() * tensor.element_size()
            if name in KV:
                kv += size
            else:
                state += size
    return kv, state


def described(cache: Any, in_order: bool = True) -> list[str]:
    """One line for each run of equal layers; or for all equal ones, wherever they are."""
    lines = [
        " ".join([cls, *(f"{name}{list(t.shape)}".replace(" ", "") for name, t in named)])
        for cls, named in held(cache)
    ]
    runs = itertools.groupby(lines if in_order else sorted(lines))
    return [f"{len(list(run))} x {line}" for line, run in runs]


def cache_of(output: Any) -> Any:
    found = (getattr(output, name, None) for name in CACHE_NAMES)
    return next((cache for cache in found if cache is not None), None)


def cache_argument(model: PreTrainedModel) -> str:
    names = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in names), "cache")


def source_width(config: PreTrainedConfig) -> int:
    """Of the vectors that the decoder attends to."""
    names = ("encoder", "encoder_config", "audio_config")
    for part in (*(attribute(config, name) for name in names), decoder_config(config)):
        part = attribute(part, "text_config") or part
        if width := attribute(part, "hidden_size") or attribute(part, "d_model"):
            return width
    raise ValueError("no width")


class Runner:
    """One model and what it is fed: tokens, and random vectors where it attends to a source."""

    def __init__(
        self, model: PreTrainedModel, config: PreTrainedConfig, batch: int, cross: str | None
    ):
        self.model = model
        self.device = next(model.parameters()).device
        text = decoder_config(config)
        self.rows = batch * ROWS.get(config.model_type, 1)
        ids: tuple[int, ...] = (self.rows, 0)
        if channels := CHANNELS.get(config.model_type):
            ids += (channels,)
        self.nothing = self.seen = torch.zeros(ids, dtype=torch.long, device=self.device)
        self.feeds_all = config.model_type in ALL_TOKENS
        self.tokens = "decoder_input_ids" if config.is_encoder_decoder else "input_ids"
        self.vocab = min(attribute(text, "vocab_size") or 32, 60)
        self.cross = "encoder_outputs" if config.is_encoder_decoder else cross
        self.source = SOURCE if self.cross else 0
        if self.cross:
            shape = (batch, self.source, source_width(config))
            self.vectors = torch.randn(shape, device=self.device)

    def step(self, tokens: int, cache: Any = None, mask: bool = False) -> Any:
        if cache is None:
            self.seen = self.nothing
        shape = (self.rows, tokens, *self.seen.shape[2:])
        ids = torch.randint(3, self.vocab, shape, device=self.device)
        first = self.seen is self.nothing
        self.seen = torch.cat([self.seen, ids], dim=1)
        given: dict[str, Any] = {self.tokens: self.seen if self.feeds_all else ids}
        if mask:
            given["attention_mask"] = torch.ones(ids.shape[:2], device=self.device)
        if argument := VECTORS.get(self.model.config.model_type):
            given[argument] = torch.zeros(1, 1, self.model.config.hidden_size, device=self.device)
            given[argument] = given[argument].to(self.model.dtype)
        if cache is not None:
            given[cache_argument(self.model)] = cache
        if self.cross and (first or self.cross != "cross_attention_states"):
            vectors = self.vectors.to(next(self.model.parameters()).dtype)
            given[self.cross] = vectors
            if self.cross == "encoder_outputs":
                given[self.cross] = BaseModelOutputWithPooling(vectors, pooler_output=vectors)
                given[self.cross].router_logits = given[self.cross].attention_mask = None
        with torch.no_grad():
            output = self.model(**given, use_cache=True, return_dict=True)
            if (returned := cache_of(output)) is not None:
                return returned
            if cache is not None:
                return cache
            # It fills a cache that it is given, and returns none.
            given[cache_argument(self.model)] = cache = DynamicCache(config=self.model.config)
            self.model(**given, use_cache=True, return_dict=True)
        if not any(totals(cache)):
            raise ValueError("it keeps no cache")
        return cache

    def run(self, cache: Any = None) -> Iterator[Any]:
        """The cache after the prompt, and after the decode steps."""
        self.seen = self.nothing
        cache = self.step(PROMPT, cache)
        yield self.with_states(cache)
        for _ in range(STEPS):
            cache = self.step(1, cache)
        yield self.with_states(cache)

    def with_states(self, cache: Any) -> Any:
        """The cache, beside what some models keep in their modules."""
        names = MODULE_STATES.get(self.model.config.model_type)
        if not names:
            return cache
        cache.in_modules = {
            f"{path}.{name}": state
            for path, module in self.model.named_modules()
            for name in names
            if (state := vars(module).get(name)) is not None
        }
        return cache
