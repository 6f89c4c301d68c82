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
import copy
import functools
import json
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.fx.experimental._config
import transformers
from hf_cache_runner import PROMPT, STEPS, Runner, described, held, totals
from hf_family_overrides import CROSS, DEFAULT_TOKENS, NOTES, SKIPPED
from hf_family_variants import AS_GIVEN, VARIANTS
from hf_tiny_configs import (
    attribute,
    base_config,
    decoder_config,
    families,
    make_config,
    model_class,
    reloaded,
    run_config,
    sizes,
    tiny_fields,
    trim,
)
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import EncoderDecoderCache, StaticCache

TARGET = Path(__file__).parents[1] / "tests" / "sizing" / "hf_families.json"
BATCH, STATIC = 2, 40
DEFAULT = " (default)"  # ends the names of defaults in `unmeasured`
SECONDS = 150  # the most that one measurement may take


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


def record(
    name: str, cls_name: str, note: str, config: PreTrainedConfig, written: dict[str, Any]
) -> dict[str, Any]:
    torch.manual_seed(0)
    run = run_config(config)
    cls = model_class(cls_name, config, run)
    model = cls._from_config(run, dtype=torch.float32).eval()
    notes = [note, NOTES.get(run.model_type)]
    if run is not config:
        notes.append(f"measured on its text decoder, {cls.__name__}")
    elif run.is_encoder_decoder:
        notes.append("n_params include the encoder")
    runner = Runner(model, run, BATCH, CROSS.get(name))
    result: dict[str, Any] = {
        "name": name,
        "model_type": config.model_type,
        "note": "; ".join(filter(None, notes)),
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
        config = runner.model.config
        cache: Any = StaticCache(config=config, max_cache_len=STATIC)
        if runner.cross in ("encoder_outputs", "encoder_hidden_states"):
            # What the encoder says is kept whole, whatever window the decoder has.
            config = copy.deepcopy(decoder_config(config))
            config.sliding_window = config.layer_types = None
            cross = StaticCache(config=config, max_cache_len=runner.source)
            cache = EncoderDecoderCache(cache, cross)
        *_, cache = runner.run(cache)
        kv, state = totals(cache)
    except Exception:
        return dict.fromkeys(names)
    return dict(zip(names, (STATIC, kv, state), strict=True))


def in_bfloat16(runner: Runner) -> dict[str, Any] | None:
    """The same model cast; or, where that cannot run, one that is made in bfloat16."""
    cls, config = type(runner.model), runner.model.config
    for make in (runner.model.to, lambda dtype: cls._from_config(config, dtype=dtype).eval()):
        runner.model = make(torch.bfloat16)
        result: dict[str, Any] = {}
        try:
            for stage, cache in zip(("prefill", "decode"), runner.run(), strict=True):
                result[f"kv_bytes_{stage}"], result[f"state_bytes_{stage}"] = totals(cache)
        except (RuntimeError, ValueError, TypeError):
            continue
        wide = {n for _, named in held(cache) for n, t in named if t.dtype != torch.bfloat16}
        return {**result, "not_bfloat16": sorted(wide)} if wide else result
    return None


def default(model_type: str, cls_name: str) -> dict[str, Any]:
    written = sizes(make_config(model_type, {}))
    return full_size(model_type, cls_name, written, make_config(model_type, dict(written)))


def full_size(
    model_type: str, cls_name: str, written: dict[str, Any], config: PreTrainedConfig
) -> dict[str, Any]:
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
    except RuntimeError:
        if runner.tokens != "input_ids":
            raise
        # Without a mask some look at the tokens for padding, which have no values here.
        cache = runner.with_states(runner.step(tokens, mask=True))
    kv, state = totals(cache)
    if not kv + state:
        raise ValueError("it keeps no cache")
    return {
        "model_type": model_type,
        "config": written,
        "T": tokens,
        "source_tokens": runner.source,
        "kv_bytes": kv,
        "state_bytes": state,
        "n_params": parameters(model),
        "layers": described(cache, in_order=False),
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
    about = __doc__[__doc__.index("A family is measured twice") :]
    parts = [f'"format": {json.dumps(" ".join(about.split()))}']
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
        if name in AS_GIVEN:
            written = trim({"model_type": model_type, **fields}, config)
        else:
            config, written = reloaded(config)
        return record(name, cls_name, note, config, written)

    yield "records", model_type, lambda: tiny(model_type, "", {})
    for variant, spec in VARIANTS.get(model_type, {}).items():
        name = f"{model_type}/{variant}"
        yield "records", name, functools.partial(tiny, name, *spec)
    yield "defaults", model_type, lambda: default(model_type, cls_name)


def family(name: str) -> str:
    return name.removesuffix(DEFAULT).split("/")[0]


def main(only: list[str]) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    # On the meta device every index that a mask selects is taken to be selected.
    torch.fx.experimental._config.meta_nonzero_assume_all_nonzero = True
    data: dict[str, Any] = {"records": {}, "defaults": {}, "unmeasured": {}}
    if TARGET.exists():  # what is not measured anew stays, so that the file is whole at any time
        old = json.loads(TARGET.read_text())
        data["records"] = {r["name"]: r for r in old["records"]}
        data["defaults"] = {r["model_type"]: r for r in old["defaults"]}
        data["unmeasured"] = old["unmeasured"]
    for model_type, cls_name in families().items():
        if only and model_type not in only:
            continue
        for kind, found in data.items():
            data[kind] = {
                name: value for name, value in found.items() if family(name) != model_type
            }
        for kind, name, measure in measures(model_type, cls_name):
            label = name if kind == "records" else name + DEFAULT
            if why := SKIPPED.get(label) or SKIPPED.get(model_type):
                data["unmeasured"][label] = why
                continue
            try:
                with time_limit(SECONDS):
                    data[kind][name] = measure()
            except Exception as error:
                data["unmeasured"][label] = reason(error)
            shown = data["unmeasured"].get(label, "ok")
            print(f"{label}: {shown}", file=sys.stderr, flush=True)
        write(data)


if __name__ == "__main__":
    main(sys.argv[1:])
