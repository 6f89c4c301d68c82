"""How a decoder's config is taken out of the config of a model that it is a part of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvjax.sizing.config import Fields

type Config = Mapping[str, Any]

NOTHING: Config = MappingProxyType({})
# A config that has one of these is a decoder's own.
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


@dataclass(frozen=True)
class Part:
    """The config of a decoder, taken out of another model's.

    Attributes:
        config: its fields.
        model_type: its family, or another wrapper.
        nested: whether it was a part, so that what equals its class's defaults may be left out.
    """

    config: Config
    model_type: object
    nested: bool = True


@dataclass(frozen=True)
class Wrapper:
    """Where a model keeps the config of the decoder that has the cache.

    Attributes:
        otherwise: the family of a part that does not name its own.
        path: the fields that lead to it.
        also: fields that hold it in other checkpoints of the family.
        fixed: whether the family is `otherwise` even where the part names another one, as in a
            class with one decoder.
        renamed: families by what parts of published checkpoints call them.
        default: fields of the decoder that the class builds where the config has no part.
        filled: whether a part that is there takes what it lacks from `default` too.
        flat: whether earlier checkpoints have the decoder's fields beside the encoder's part.
        given: fields that the class sets in the part, whatever it says.
    """

    otherwise: str | None = None
    path: tuple[str, ...] = ("text_config",)
    also: tuple[str, ...] = ()
    fixed: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    default: Config = NOTHING
    filled: bool = False
    flat: bool = False
    given: Config = NOTHING

    def unwrap(self, config: Config, model_type: str) -> Part:
        """The decoder's config.

        Raises:
            ValueError: a part is no JSON object, does not name its family, or is not there while
                its fields are, in a family that never had them there.
        """
        part = self._part(config, model_type)
        if part is None:
            return self._without_part(config, model_type)
        filled = {**self.default, **part} if self.filled else part
        return Part({**filled, **self.given}, self._family(part, model_type))

    def _part(self, config: Config, model_type: str) -> Config | None:
        part: Config | None = config
        for name in self.path:
            part = Fields(part or {}, model_type).part(name)
        others = (Fields(config, model_type).part(name) for name in self.also)
        return part if part is not None else next((o for o in others if o is not None), None)

    def _family(self, part: Config, model_type: str) -> object:
        """What the part calls itself, or what it is in this model."""
        own = part.get("model_type")
        if own is None or self.fixed:
            if self.otherwise is None:
                raise ValueError(
                    f"{'.'.join(self.path)}.model_type: absent; accepted for {model_type}: the "
                    "decoder's family"
                )
            return self.otherwise
        return self.renamed.get(own, own) if isinstance(own, str) else own

    def _without_part(self, config: Config, model_type: str) -> Part:
        """The decoder of a config that has no part for it."""
        sizes = [name for name in _DEPTHS if config.get(name)]
        if sizes and not self.flat:
            raise ValueError(
                f"{sizes[0]}: got {config[sizes[0]]!r} without {'.'.join(self.path)}; accepted for "
                f"{model_type}: the decoder's fields in {'.'.join(self.path)}"
            )
        own = config if sizes else self.default
        return Part({**own, **self.given}, self._family({}, model_type), nested=not sizes)
