"""Families of which some or all layers keep a state instead of records."""

from kvjax.sizing.families.family import Reader

FAMILIES: dict[str, Reader] = {}
