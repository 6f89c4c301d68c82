"""Models that hold the decoder's config as a part of their own, such as vision-language models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvjax.sizing.config import Fields


@dataclass(frozen=True)
class Wrapper:
    """Where a model keeps the config of the decoder that has the cache.

    Attributes:
        path: the fields that lead to it.
        otherwise: the family of a part that does not name its own.
    """

    path: tuple[str, ...] = ("text_config",)
    otherwise: str | None = None

    def unwrap(self, config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
        """The decoder's config, with its model_type."""
        part: Mapping[str, Any] = config
        for name in self.path:
            part = Fields(part, model_type).part(name) or {}
        if "model_type" not in part and self.otherwise is None:
            raise ValueError(
                f"{'.'.join(self.path)}.model_type: absent; accepted for {model_type}: the "
                "decoder's family"
            )
        return {"model_type": self.otherwise, **part}


WRAPPERS: dict[str, Wrapper] = {
    "llava": Wrapper(otherwise="llama"),
}
