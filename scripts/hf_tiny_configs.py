"""Tiny configs of every decoder family of transformers, and the classes that run them."""

from __future__ import annotations

import contextlib
import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import transformers
from hf_family_overrides import DECODER_ALONE, FAMILIES, NOISE, SIZES, TINY
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

CAUSAL_LM = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
# Of encoders, a reader of cache sizes may want these and nothing else.
ENCODER_FIELDS = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads")


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
        "CAUSAL_IMAGE_MODELING",
    ):
        for model_type, name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            found.setdefault(model_type, name)
    return found


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
    """`over` on top of `base`, dict by dict."""
    merged = dict(base)
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = merge(merged[name], value)
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
    fields = {name: value for name, value in merge(fields, over).items() if value is not ...}
    return every_kind(config, fields)


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
            if sub is text or decoder_config(sub) is text or not sub.model_type:
                kept[name] = trim(value, sub)
            else:
                kept[name] = {f: value[f] for f in ENCODER_FIELDS if value.get(f) is not None}
        elif not name.endswith(NOISE):
            kept[name] = value
    return kept


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


def model_class(
    name: str, config: PreTrainedConfig, run: PreTrainedConfig
) -> type[PreTrainedModel]:
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
