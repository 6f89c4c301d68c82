"""What the caches of transformers hold, for every decoder family that it knows.

    python scripts/measure_hf_caches.py               writes tests/sizing/hf_families.json
    python scripts/measure_hf_caches.py gemma3 t5     measures these families anew, keeps the others

Needs torch and transformers, and imports nothing of kvjax: the two must agree without sharing
code. A family is measured twice.

  records   a tiny model with random weights on the CPU in float32: 2 rows, 24 prompt tokens, then 5
            decode steps. `kv_bytes` are its keys, values and indexer keys; `state_bytes` every
            other tensor of the cache, whatever its length, but not its positions. `static` is the
            same prompt and steps in a StaticCache of 40 tokens (null where the family fails in
            one), `bf16` the same model in bfloat16, and what of its cache has another dtype.
  defaults  the model that the config class describes when only its plain sizes are said, at full
            size on the meta device in bfloat16: one row of T tokens.

`config` is what `save_pretrained` writes, without token ids and without the insides of encoders,
or, where AS_GIVEN says so, an older spelling; the model is made from what was written.
Encoder-decoder models get their encoder's output as random vectors, `source_tokens` of them, so
the encoder itself never runs; both caches are counted. Of a multimodal model the text decoder
alone is run, and `n_params` are the parameters of what was run. What could not be run is in
`unmeasured`, with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import json
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.fx.experimental._config
import transformers
from hf_family_overrides import (
    ALL_TOKENS,
    CHANNELS,
    CROSS,
    DECODER_ALONE,
    DEFAULT_TOKENS,
    FAMILIES,
    MODULE_STATES,
    ROWS,
    SIZES,
    SKIPPED,
    TINY,
    VECTORS,
)
from hf_family_variants import AS_GIVEN, VARIANTS
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto import modeling_auto

TARGET = Path(__file__).parents[1] / "tests" / "sizing" / "hf_families.json"
CAUSAL_LM = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
BATCH, PROMPT, STEPS, SOURCE, STATIC = 2, 24, 5, 17, 40
KV = ("keys", "values", "indexer_keys")
TABLES = ("indexer_position_ids",)  # positions, not counted
# Of encoders, a reader of cache sizes may want these and nothing else.
ENCODER_FIELDS = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads")
# Where a model takes its cache, and where it returns it.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")
SECONDS = 150  # the most that one measurement may take


def families() -> dict[str, str]:
    """Model type to the class that decodes with it; encoder-decoder classes come first."""
    found: dict[str, str] = {}
    for task in (
        "SEQ_TO_SEQ_CAUSAL_LM",
        "SPEECH_SEQ_2_SEQ",
        "CAUSAL_LM",
        "IMAGE_TEXT_TO_TEXT",
        "MULTIMODAL_LM",
        "TEXT_TO_WAVEFORM",
    ):
        for model_type, name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            found.setdefault(model_type, name)
    return found


# --- configs


def make_config(model_type: str, fields: dict[str, Any]) -> PreTrainedConfig:
    """The config of `model_type`, with `fields` over its defaults; sub-configs may be dicts."""
    return CONFIG_MAPPING[model_type](**fields)


def attribute(config: PreTrainedConfig, name: str) -> Any:
    """The field, or None where there is none or where layers differ in it."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, dict by dict; a field set to `...` falls back to the default."""
    merged = dict(base)
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = merge(merged[name], value)
        elif value is ...:
            merged.pop(name, None)
        else:
            merged[name] = value
    return merged


def tiny_fields(config: PreTrainedConfig, over: dict[str, Any]) -> dict[str, Any]:
    """Small values for the fields that `config` has, here and in its sub-configs; `over` wins."""
    over = merge(FAMILIES.get(config.model_type, {}), over)
    fields: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        sub = attribute(config, name)
        if isinstance(sub, PreTrainedConfig):
            wanted = over.get(name, {})
            if wanted is ...:
                continue
            if wanted.get("model_type", sub.model_type) != sub.model_type:
                sub = make_config(wanted["model_type"], {})
            over = {**over, name: tiny_fields(sub, wanted)}
        elif name in TINY and value is not None and not isinstance(value, (dict, list, tuple)):
            fields[name] = TINY[name]
    if "kv_lora_rank" in fields:  # latent attention derives its head width, and has no groups
        fields.pop("head_dim", None)
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if attribute(config, "is_decoder") is False and not config.is_encoder_decoder:
        fields["is_decoder"] = True
    if config.model_type:
        fields["model_type"] = config.model_type
    return every_kind(config, merge(fields, over))


def every_kind(config: PreTrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` with as many layers as it takes to have every kind of layer that `config` has."""
    kinds = set(attribute(config, "layer_types") or ())
    if len(kinds) < 2 or "layer_types" in fields or "num_hidden_layers" not in fields:
        return fields
    for layers in range(fields["num_hidden_layers"], 17):
        grown = {**fields, "num_hidden_layers": layers}
        with contextlib.suppress(Exception):
            if set(type(config)(**grown).layer_types) == kinds:
                return grown
    return fields


def base_config(model_type: str, over: dict[str, Any]) -> PreTrainedConfig:
    """The defaults; or, where the class has no valid ones, with the fields of the tiny model."""
    try:
        return make_config(model_type, {})
    except Exception:
        return make_config(model_type, merge(FAMILIES[model_type], over))


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    return config.get_text_config(decoder=True)


def reloaded(config: PreTrainedConfig) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The config as it comes back from the config.json that it writes, and that file, trimmed."""
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        written = json.loads((Path(directory) / "config.json").read_text())
        config = type(config).from_pretrained(directory)
    return config, trim(written, config)


def trim(written: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    text = decoder_config(config)
    kept: dict[str, Any] = {}
    for name, value in written.items():
        sub = attribute(config, name)
        if isinstance(sub, PreTrainedConfig) and isinstance(value, dict):
            if sub is text or decoder_config(sub) is text:
                kept[name] = trim(value, sub)
            else:
                kept[name] = {f: value[f] for f in ENCODER_FIELDS if value.get(f) is not None}
        elif not (
            name.endswith(("_token_id", "_token_ids", "_token_index", "2label", "label2id", "_std"))
            or name in ("id2label", "transformers_version", "dtype", "initializer_range")
        ):
            kept[name] = value
    return kept


# --- models


def model_class(name: str, config: PreTrainedConfig, run: PreTrainedConfig) -> type:
    """The class to run: the family's own, `name`, or the class of the text decoder inside it."""
    if run is config and (run.is_encoder_decoder or run.model_type not in CAUSAL_LM):
        return getattr(transformers, name)
    if causal := CAUSAL_LM.get(run.model_type):
        return getattr(transformers, causal)
    # No mapping names it: with a head if its module has one that decodes, else the last without.
    module = importlib.import_module(type(run).__module__.replace("configuration_", "modeling_"))
    found = [
        item
        for item in vars(module).values()
        if isinstance(item, type)
        and issubclass(item, PreTrainedModel)
        and getattr(item, "config_class", None) is type(run)
    ]
    with_head = [c for c in found if c.__name__.endswith(("ForCausalLM", "LMHeadModel"))]
    return (with_head or found)[-1]


def run_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of `config` that is run: its text decoder, unless it belongs to an encoder."""
    whole = config.is_encoder_decoder and config.model_type not in DECODER_ALONE
    return config if whole else decoder_config(config)


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


def described(cache: Any) -> list[str]:
    """One line for each run of equal layers."""
    lines = [
        " ".join([cls, *(f"{name}{list(t.shape)}".replace(" ", "") for name, t in named)])
        for cls, named in held(cache)
    ]
    return [f"{len(list(run))} x {line}" for line, run in itertools.groupby(lines)]


def cache_of(output: Any) -> Any:
    found = (getattr(output, name, None) for name in CACHE_NAMES)
    return next((cache for cache in found if cache is not None), None)


def cache_argument(model: nn.Module) -> str:
    names = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in names), "cache")


def source_width(config: PreTrainedConfig) -> int:
    """Of the vectors that the decoder attends to."""
    names = ("encoder", "encoder_config", "audio_config", "vision_config")
    for part in (*(attribute(config, name) for name in names), decoder_config(config)):
        part = attribute(part, "text_config") or part
        if width := attribute(part, "hidden_size") or attribute(part, "d_model"):
            return width
    raise ValueError("no width")


class Runner:
    """One model and what it is fed: tokens, and random vectors where it attends to a source."""

    def __init__(self, model: nn.Module, config: PreTrainedConfig, batch: int, cross: str | None):
        self.model = model
        self.device = next(model.parameters()).device
        text = decoder_config(config)
        self.rows = batch * ROWS.get(config.model_type, 1)
        ids = (self.rows, 0)
        if channels := CHANNELS.get(config.model_type):
            ids += (channels,)
        self.seen = torch.zeros(ids, dtype=torch.long, device=self.device)
        self.feeds_all = config.model_type in ALL_TOKENS
        self.tokens = "decoder_input_ids" if config.is_encoder_decoder else "input_ids"
        self.vocab = min(attribute(text, "vocab_size") or 32, 60)
        self.cross = "encoder_outputs" if config.is_encoder_decoder else cross
        self.source = SOURCE if self.cross else 0
        if self.cross:
            axes = (1,) if self.cross == "perceiver_embeddings" else ()
            shape = (batch, *axes, self.source, source_width(config))
            self.vectors = torch.randn(shape, device=self.device)

    def step(self, tokens: int, cache: Any = None, mask: bool = False) -> Any:
        shape = (self.rows, tokens, *self.seen.shape[2:])
        ids = torch.randint(3, self.vocab, shape, device=self.device)
        self.seen = ids if cache is None else torch.cat([self.seen, ids], dim=1)
        given: dict[str, Any] = {self.tokens: self.seen if self.feeds_all else ids}
        if mask:
            given["attention_mask"] = torch.ones(ids.shape[:2], device=self.device)
        if argument := VECTORS.get(self.model.config.model_type):
            given[argument] = torch.zeros(1, 1, self.model.config.hidden_size, device=self.device)
            given[argument] = given[argument].to(self.model.dtype)
        if cache is not None:
            given[cache_argument(self.model)] = cache
        if self.cross:
            vectors = self.vectors.to(next(self.model.parameters()).dtype)
            given[self.cross] = vectors
            if self.cross == "encoder_outputs":
                given[self.cross] = BaseModelOutput(last_hidden_state=vectors)
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


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


# --- records


def record(name: str, cls_name: str, note: str, config: PreTrainedConfig) -> dict[str, Any]:
    torch.manual_seed(0)
    config, written = reloaded(config)
    run = run_config(config)
    cls = model_class(cls_name, config, run)
    model = cls._from_config(run, dtype=torch.float32).eval()
    if run is not config:
        note = "; ".join(filter(None, [note, f"measured on its text decoder, {cls.__name__}"]))
    runner = Runner(model, run, BATCH, CROSS.get(name))
    result: dict[str, Any] = {
        "name": name,
        "model_type": config.model_type,
        "note": note,
        "batch": BATCH,
        "prefill": PROMPT,
        "decode_steps": STEPS,
        "source_tokens": runner.source,
        "config": written,
        "n_params": parameters(model),
    }
    for stage, cache in zip(("prefill", "decode"), runner.run(), strict=True):
        result[f"kv_bytes_{stage}"], result[f"state_bytes_{stage}"] = totals(cache)
        if stage == "prefill":
            result["layers"] = described(cache)
            before = result["state_bytes_prefill"]
        elif result["state_bytes_decode"] != before:
            result["layers_after_decode"] = described(cache)
    result.update(static(runner))
    result["bf16"] = in_bfloat16(runner)
    return result


def static(runner: Runner) -> dict[str, Any]:
    """The same prompt and steps in a StaticCache; None where the family has no use for one."""
    names = ("static_max_cache_len", "static_kv_bytes", "static_state_bytes")
    try:
        cache: Any = StaticCache(config=runner.model.config, max_cache_len=STATIC)
        if runner.cross:
            cross = StaticCache(config=runner.model.config, max_cache_len=runner.source)
            cache = EncoderDecoderCache(cache, cross)
        *_, cache = runner.run(cache)
        kv, state = totals(cache)
    except Exception:
        return dict.fromkeys(names)
    return dict(zip(names, (STATIC, kv, state), strict=True))


def in_bfloat16(runner: Runner) -> dict[str, Any] | None:
    runner.model.to(torch.bfloat16)
    result: dict[str, Any] = {}
    try:
        for stage, cache in zip(("prefill", "decode"), runner.run(), strict=True):
            result[f"kv_bytes_{stage}"], result[f"state_bytes_{stage}"] = totals(cache)
    except (RuntimeError, ValueError, TypeError):
        return None
    wide = {n for _, named in held(cache) for n, t in named if t.dtype != torch.bfloat16}
    if wide:
        result["not_bfloat16"] = sorted(wide)
    return result


def sizes(config: PreTrainedConfig) -> dict[str, Any]:
    """The least that a config.json says: its type and its plain sizes, or those of its parts."""
    fields: dict[str, Any] = {"model_type": config.model_type}
    for name, value in config.to_dict().items():
        if isinstance(sub := attribute(config, name), PreTrainedConfig):
            if sub is decoder_config(config) or name == "encoder":
                fields[name] = {"model_type": sub.model_type}
        elif name in SIZES and value is not None:
            fields[name] = value
    if attribute(config, "is_decoder") is False and not config.is_encoder_decoder:
        fields["is_decoder"] = True
    return fields


def default(model_type: str, cls_name: str) -> dict[str, Any]:
    written = sizes(make_config(model_type, {}))
    config = make_config(model_type, dict(written))
    run = run_config(config)
    with torch.device("meta"):
        # Eager attention asks no mask for its values, which the meta device has not.
        cls = model_class(cls_name, config, run)
        model = cls._from_config(run, dtype=torch.bfloat16, attn_implementation="eager").eval()
    skip_experts(model)
    limit = attribute(decoder_config(run), "max_position_embeddings") or 0
    tokens = DEFAULT_TOKENS.get(model_type, min(8192, limit) if limit > 0 else 8192)
    runner = Runner(model, run, 1, CROSS.get(model_type))
    try:
        cache = runner.with_states(runner.step(tokens))
    except (RuntimeError, NotImplementedError):
        # Without a mask some look at the tokens for padding, which have no values here.
        cache = runner.with_states(runner.step(tokens, mask=True))
    kv, state = totals(cache)
    return {
        "model_type": model_type,
        "config": written,
        "T": tokens,
        "source_tokens": runner.source,
        "kv_bytes": kv,
        "state_bytes": state,
        "n_params": parameters(model),
        "layers": described(cache),
    }


def skip_experts(model: nn.Module) -> None:
    """Routing needs values, which the meta device has not; experts leave nothing in the cache."""
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.forward = lambda hidden, *_, **__: torch.zeros_like(hidden)


def reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = " ".join(lines[:2])
    return f"{type(error).__name__}: {text}"[:200]


def write(data: dict[str, Any]) -> None:
    """Atomically, a record a line."""
    parts = [f'"format": {json.dumps(" ".join(__doc__.split("Needs")[1].split()))}']
    for kind in ("records", "defaults"):
        lines = ",\n".join(json.dumps(r, separators=(",", ":")) for r in data[kind].values())
        parts.append(f'"{kind}": [\n{lines}\n]')
    parts.append(f'"unmeasured": {json.dumps(data["unmeasured"], indent=0)}')
    beside = TARGET.with_suffix(".new")
    beside.write_text("{" + ",\n".join(parts) + "}\n")
    beside.rename(TARGET)


def measures(model_type: str, cls_name: str) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """All that is measured of a family: where it goes, its name there, and the measurement."""

    def tiny(name: str, note: str, over: dict[str, Any]) -> dict[str, Any]:
        fields = tiny_fields(base_config(model_type, over), over)
        config = make_config(model_type, dict(fields))
        result = record(name, cls_name, note, config)
        if name in AS_GIVEN:
            result["config"] = trim({"model_type": model_type, **fields}, config)
        return result

    yield "records", model_type, lambda: tiny(model_type, "", {})
    for variant, spec in VARIANTS.get(model_type, {}).items():
        name = f"{model_type}/{variant}"
        yield "records", name, functools.partial(tiny, name, *spec)
    yield "defaults", model_type, lambda: default(model_type, cls_name)


def main(only: list[str]) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    # On the meta device every index that a mask selects is taken to be selected.
    torch.fx.experimental._config.meta_nonzero_assume_all_nonzero = True
    data: dict[str, Any] = {"records": {}, "defaults": {}, "unmeasured": {}}
    if only and TARGET.exists():
        old = json.loads(TARGET.read_text())
        data["records"] = {r["name"]: r for r in old["records"]}
        data["defaults"] = {r["model_type"]: r for r in old["defaults"]}
        data["unmeasured"] = old["unmeasured"]
    for model_type, cls_name in families().items():
        if only and model_type not in only:
            continue
        for kind, name, measure in measures(model_type, cls_name):
            label = name if kind == "records" else f"{name} (default)"
            data[kind].pop(name, None)
            data["unmeasured"].pop(label, None)
            try:
                if why := SKIPPED.get(label) or SKIPPED.get(model_type):
                    raise ValueError(why)
                with time_limit(SECONDS):
                    data[kind][name] = measure()
            except Exception as error:
                data["unmeasured"][label] = reason(error)
            shown = data["unmeasured"].get(label, "ok")
            print(f"{label}: {shown}", file=sys.stderr, flush=True)
        write(data)


if __name__ == "__main__":
    main(sys.argv[1:])
