"""Models that kvjax converted to latent attention.

Their configs are those of the models they were made from, with the fields of latents beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvjax.sizing.config import Count, Fields
from kvjax.sizing.families.family import Reader
from kvjax.sizing.layer import LayerSpec
from kvjax.sizing.spec import ModelSpec
from kvjax.sizing.weights.count import count_weights

MODEL_TYPE = "kvjax_mla"
# What the config has beside the source's fields.
FIELDS = frozenset(
    {
        "source_model_type",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "rope_heads",
        "rope_pairs",
    }
)


@dataclass(frozen=True)
class Converted:
    """Reads the config of a converted model.

    Attributes:
        sources: readers of the models that it may have been made from, by model_type.
    """

    sources: Mapping[str, Reader]

    def read(self, fields: Fields) -> ModelSpec:
        """The model that the config describes; biases of attention are counted as the source's."""
        fields.ignore(FIELDS)
        source = self._source(fields)
        spec = self.sources[source.model_type].read(source)
        layers = tuple(_latent(fields, layer) for layer in spec.layers)
        return replace(spec, layers=layers, weights=count_weights(source, spec))

    def _source(self, fields: Fields) -> Fields:
        model_type = fields.get("source_model_type")
        if model_type == MODEL_TYPE or model_type not in list(self.sources):
            raise ValueError(
                f"source_model_type: got {model_type!r}; accepted: the model_type that the model "
                "had before it was converted"
            )
        return fields.without(FIELDS, model_type)


def _latent(fields: Fields, layer: LayerSpec) -> LayerSpec:
    rope = fields.count(Count("qk_rope_head_dim"))
    return replace(
        layer,
        kind="latent",
        kv_heads=1,
        key_dim=fields.number("qk_nope_head_dim") + rope,
        latent_rank=fields.count(Count("kv_lora_rank")),
        rope_dim=rope,
        rope_heads=fields.count(Count("rope_heads")),
    )
