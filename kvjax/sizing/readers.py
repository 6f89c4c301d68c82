"""From a config.json to a ModelSpec, by the family that its model_type names."""

import difflib
from dataclasses import replace

from kvjax.sizing.config import ConfigSource, Fields, read_config
from kvjax.sizing.families import READERS, WRAPPERS
from kvjax.sizing.spec import ModelSpec
from kvjax.sizing.weights import count_weights


def load(source: ConfigSource) -> ModelSpec:
    """The cache of the model that a Hugging Face config.json describes.

    Args:
        source: a config.json, a directory that has one, or its content as a mapping.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: names the field, what was given and what is accepted.
    """
    config = read_config(source)
    outer = model_type = _known(config.get("model_type"))
    while model_type in WRAPPERS:
        config = WRAPPERS[model_type].unwrap(config, model_type)
        model_type = _known(config["model_type"])
    fields = Fields(config, model_type, nested=model_type != outer)
    spec = READERS[model_type].read(fields)
    return replace(spec, model_type=outer, weights=count_weights(fields, spec))


def _known(model_type: object) -> str:
    """The name of a family or wrapper."""
    if isinstance(model_type, str) and (model_type in READERS or model_type in WRAPPERS):
        return model_type
    known = [*READERS, *WRAPPERS]
    alike = difflib.get_close_matches(str(model_type), known, n=5, cutoff=0.5)
    raise ValueError(
        f"model_type: got {model_type!r}; accepted: one of {len(known)} families "
        f"(kvjax.sizing.READERS){', such as ' + ', '.join(alike) if alike else ''}"
    )
