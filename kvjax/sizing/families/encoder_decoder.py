"""Families whose decoder layers also attend to an encoder's output."""

from kvjax.sizing.families.family import Reader

FAMILIES: dict[str, Reader] = {}
