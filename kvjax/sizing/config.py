"""Reading config.json and its fields, with errors that name what is wrong."""

import json
import math
import os
from collections.abc import Callable, Collection, Mapping
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
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"source: got {source!r}; accepted: a path, or the config as a mapping")
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
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply; accepted: a config.json") from None
    except ValueError:  # the one other that reading numbers raises
        raise ValueError(f"{path}: a number of too many digits; accepted: a config.json") from None
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
        also: other names under which the family's class accepts the field.
        nested: taken where the config is part of another model's and lacks the field: such a part
            is saved without what equals its class's defaults. A model's own config must have it.
    """

    name: str
    absent: int | Otherwise = Otherwise.REFUSED
    null: int | Otherwise = Otherwise.REFUSED
    also: tuple[str, ...] = ()
    nested: int | None = None


@dataclass(frozen=True)
class Flag:
    """A field that holds true or false, and what its family takes without it."""

    name: str
    absent: bool


class Fields:
    """The fields of one config as its family reads them; remembers which were read.

    Attributes:
        model_type: the family.
        nested: whether the config is part of another model's.
    """

    def __init__(self, config: Mapping[str, Any], model_type: str, *, nested: bool = False) -> None:
        self.model_type = model_type
        self.nested = nested
        self._config = config
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.get(name) is not None

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
        name, value = self._one_of((rule.name, *rule.also))
        if value is not None:
            return whole(name, value)
        present = name in self._config
        stand_in = rule.null if present else rule.absent
        if isinstance(stand_in, int):
            return stand_in
        if stand_in is Otherwise.DERIVED and derived is not None:
            return derived()
        if self.nested and rule.nested is not None:
            return rule.nested
        raise ValueError(
            f"{rule.name}: {'got null' if present else 'absent'}; accepted for "
            f"{self.model_type}: a whole number, at least 1"
        )

    def number(self, name: str, absent: int | None = None, least: int = 0) -> int:
        """The value of a whole-number field of at least `least`."""
        value = self.get(name, absent)
        if value is None:
            value = absent
        return whole(name, value, least)

    def factor(self, name: str, absent: float) -> float:
        """The value of a field that a size is multiplied with; `absent` where it is not there."""
        value = self.get(name, absent)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 < value < math.inf):
            raise ValueError(f"{name}: got {value!r}; accepted: a number above 0")
        return value

    def names(self, name: str, depth: int, accepted: Collection[str]) -> tuple[str, ...] | None:
        """The value of a field that names the kind of each layer; None where absent or null."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != depth:
            given = f"{len(value)} names" if isinstance(value, list) else repr(value)
            raise ValueError(f"{name}: got {given}; accepted: one name for each of {depth} layers")
        for item in value:
            if item not in list(accepted):  # a list, since a name from JSON may be unhashable
                raise ValueError(
                    f"{name}: got {item!r}; accepted for {self.model_type}: {', '.join(accepted)}"
                )
        return tuple(value)

    def part(self, name: str) -> Mapping[str, Any] | None:
        """The value of a field that holds a config of its own; None where absent or null."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{name}: got {value!r}; accepted: a JSON object")
        return value

    def layer(self, index: int) -> "Fields":
        """The fields as layer `index` sees them: `per_layer_config` may override some."""
        overrides: dict[int, Mapping[str, Any]] = {}
        for key, value in (self.part("per_layer_config") or {}).items():
            if not (str(key).isdecimal() and isinstance(value, Mapping)):
                raise ValueError(
                    f"per_layer_config: got {value!r} for {key!r}; accepted: a JSON object for the "
                    "number of a layer"
                )
            # transformers writes the keys with leading zeros, so that they sort by number.
            overrides[int(key)] = value
        own = overrides.get(index)
        if own is None:
            return self
        view = Fields({**self._config, **own}, self.model_type, nested=self.nested)
        view._read = self._read
        return view

    def without(self, names: Collection[str], model_type: str) -> "Fields":
        """The other fields, as those of another family."""
        rest = {name: value for name, value in self._config.items() if name not in names}
        return Fields(rest, model_type, nested=self.nested)

    def ignore(self, names: Collection[str]) -> None:
        """Take fields that the family has, or is published with, and that change no cache."""
        self._read.update(names)

    def refuse_unread(self) -> None:
        """Refuse a config that sets a cache-shaped field which was not read."""
        for name in sorted(CACHE_FIELDS - self._read):
            if self._config.get(name):
                raise ValueError(
                    f"{name}: got {self._config[name]!r}; accepted for {self.model_type}: absent, "
                    "null, false or 0, since that family has no such field"
                )

    def _one_of(self, names: tuple[str, ...]) -> tuple[str, Any]:
        """The first of the fields that is there, and its value; they must not contradict."""
        given = {name: self.get(name) for name in names if name in self._config}
        values = {name: value for name, value in given.items() if value is not None}
        if len(set(map(repr, values.values()))) > 1:
            raise ValueError(f"{', '.join(values)}: got {values}; accepted: one value")
        if values:
            return next(iter(values.items()))
        return next(iter(given), names[0]), None
