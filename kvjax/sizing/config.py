"""Reading config.json and its fields, with errors that name what is wrong."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from kvjax.sizing.cache_fields import CACHE_FIELDS
from kvjax.sizing.checks import whole

type ConfigSource = str | os.PathLike[str] | Mapping[str, Any]


def read_config(source: ConfigSource) -> dict[str, Any]:
    """The config as a dict, from a config.json, a directory that has one, or a mapping.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a JSON object; names the file and the line.
    """
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; accepted: a config.json or its directory")
    try:
        config = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{path}, {place}: not JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file; accepted: JSON in UTF-8") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: got a JSON {type(config).__name__}; accepted: a JSON object")
    return config


class Otherwise(Enum):
    """What an absent or null field means where it means no fixed number."""

    REFUSED = "refused"
    DERIVED = "derived"  # it follows from the other fields


@dataclass(frozen=True)
class Count:
    """A field that holds a positive whole number, and what its family takes without it.

    Attributes:
        name: the field's name in config.json.
        absent: taken where the config lacks the field.
        null: taken where it is null.
    """

    name: str
    absent: int | Otherwise = Otherwise.REFUSED
    null: int | Otherwise = Otherwise.REFUSED


@dataclass(frozen=True)
class Flag:
    """A field that holds true or false, and what its family takes without it."""

    name: str
    absent: bool


class Fields:
    """The fields of one config as its family reads them; remembers which were read."""

    def __init__(self, config: Mapping[str, Any], model_type: str) -> None:
        self.model_type = model_type
        self._config = config
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._config.get(name) is not None

    def get(self, name: str, absent: Any = None) -> Any:
        """The field's value, `absent` where the config lacks it."""
        self._read.add(name)
        return self._config.get(name, absent)

    def flag(self, rule: Flag | bool) -> bool:
        """The value of a field that is true or false; a bool is a rule without a field."""
        if isinstance(rule, bool):
            return rule
        value = self.get(rule.name, rule.absent)
        if not isinstance(value, bool):
            raise ValueError(f"{rule.name}: got {value!r}; accepted: true or false")
        return value

    def count(self, rule: Count, derived: Callable[[], int] | None = None) -> int:
        """The value of a whole-number field, or what stands in for it.

        Args:
            rule: the field.
            derived: gives the number that follows from the other fields.
        """
        value = self.get(rule.name)
        if value is not None:
            return whole(rule.name, value)
        present = rule.name in self._config
        stand_in = rule.null if present else rule.absent
        if isinstance(stand_in, int):
            return stand_in
        if stand_in is Otherwise.DERIVED and derived is not None:
            return derived()
        raise ValueError(
            f"{rule.name}: {'got null' if present else 'absent'}; accepted for "
            f"{self.model_type}: a whole number, at least 1"
        )

    def refuse_unread(self) -> None:
        """Refuse a config that sets a cache-shaped field which was not read."""
        for name in sorted(CACHE_FIELDS - self._read):
            if self._config.get(name):
                raise ValueError(
                    f"{name}: got {self._config[name]!r}; accepted for {self.model_type}: absent, "
                    "null, false or 0, since that family has no such field"
                )
