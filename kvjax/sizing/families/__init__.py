"""Where each published family keeps the shape of its cache in config.json.

One table for each kind of family; `READERS` is all of them; `WRAPPERS` says where other models keep
such a config. A new family is a row in one of the tables: names of fields, what the family's class
takes where one is absent or null, and the kinds of its layers.
"""

from kvjax.sizing.families import (
    bert,
    converted,
    encoder_decoder,
    gemma,
    gpt,
    hybrid,
    latent,
    loops,
    multimodal,
    patterns,
    plain,
    remote,
    uneven,
    windowed,
    wrappers,
)
from kvjax.sizing.families.family import Reader

READERS: dict[str, Reader] = {
    **plain.FAMILIES,
    **gpt.FAMILIES,
    **bert.FAMILIES,
    **windowed.FAMILIES,
    **patterns.FAMILIES,
    **uneven.FAMILIES,
    **gemma.FAMILIES,
    **loops.FAMILIES,
    **latent.FAMILIES,
    **hybrid.FAMILIES,
    **encoder_decoder.FAMILIES,
    **multimodal.FAMILIES,
    **remote.FAMILIES,
}
READERS[converted.MODEL_TYPE] = converted.Converted(READERS)

WRAPPERS = wrappers.WRAPPERS

__all__ = ["READERS", "WRAPPERS"]
