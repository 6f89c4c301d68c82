"""From a config.json to a ModelSpec, by the family that its model_type names."""

import difflib
from dataclasses import replace

from kvjax.sizing.config import ConfigSource, Fields, read_config
from kvjax.sizing.families import READERS, WRAPPERS
from kvjax.sizing.families.wrapper import Part
from kvjax.sizing.spec import ModelSpec
from kvjax.sizing.weights.count import count_weights

_MOST_LEVELS = 16  # of configs within configs


def load(source: ConfigSource) -> ModelSpec:
    """The cache of the model that a Hugging Face config.json describes.

    Args:
        source: a config.json, a directory that has one, or its content as a mapping.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: names the field, what was given and what is accepted.
    """
    part = Part(read_config(source), None, nested=False)
    outer = model_type = _known(part.config.get("model_type"))
    tied: object = None  # the outermost model that says so decides
    own_sizes = True
    for _ in range(_MOST_LEVELS):
        if model_type not in WRAPPERS:
            break
        own_sizes = own_sizes and not WRAPPERS[model_type].default
        tied = part.config.get("tie_word_embeddings") if tied is None else tied
        part = WRAPPERS[model_type].unwrap(part.config, model_type)
        model_type = _known(part.model_type)
    else:
        raise ValueError(
            f"model_type: got {model_type!r} within {_MOST_LEVELS} others; accepted: a decoder's"
        )
    fields = Fields(part.config, model_type, nested=part.nested)
    spec = READERS[model_type].read(fields)
    weights = spec.weights or count_weights(fields, spec, tied, own_sizes)
    return replace(spec, model_type=outer, weights=weights)


def _known(model_type: object) -> str:
    """The name of a family or wrapper."""
    if isinstance(model_type, str) and (model_type in READERS or model_type in WRAPPERS):
        return model_type
    known = [*READERS, *WRAPPERS]
    alike = difflib.get_close_matches(model_type, known) if isinstance(model_type, str) else []
    raise ValueError(
        f"model_type: got {model_type!r}; accepted: one of {len(known)} families (kvjax.sizing."
        f"READERS and WRAPPERS){', such as ' + ', '.join(alike) if alike else ''}"
    )
