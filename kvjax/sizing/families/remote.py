"""Published families that transformers has no class for, as their own code reads the config."""

from kvjax.sizing.families.family import Reader

FAMILIES: dict[str, Reader] = {}
