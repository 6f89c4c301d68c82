"""Families whose layers keep a latent (MLA), with an index or compressed pools beside it."""

from kvjax.sizing.families.family import Reader

FAMILIES: dict[str, Reader] = {}
