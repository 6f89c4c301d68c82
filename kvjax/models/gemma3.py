"""Gemma-3 (text): Gemma-2 with normed queries and keys, and a RoPE of its own for windows."""

from typing import Any

from kvjax.models import gemma2, llama
from kvjax.models.family import Family
from kvjax.models.fields import FULL, SLIDING, choose
from kvjax.models.qwen3 import QK_NORMS
from kvjax.nn import DecoderConfig
from kvjax.sizing import ModelSpec


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    # transformers reads this field and applies no cap, so that a value of it has no sure meaning.
    field = "attn_logit_softcapping"
    choose(field, config.get(field), {None: None})
    config = {
        "final_logit_softcapping": None,
        **config,
        field: None,
        "rope_scaling": None,
        "rope_parameters": _rope_by_kind(config),
    }
    return llama.with_attention(gemma2.decoder(config, spec), qk_norm="head")


def _rope_by_kind(config: dict) -> dict[str, dict[str, Any]]:
    """RoPE's fields in the new spelling; in the old one scaling is of full attention alone."""
    given = config.get("rope_parameters") or {}
    if unknown := given.keys() - {FULL, SLIDING}:
        raise ValueError(
            f"rope_parameters: got {', '.join(sorted(unknown))}; accepted: {FULL} and {SLIDING}, "
            "with the parameters of each"
        )
    return {
        FULL: {
            "rope_theta": config.get("rope_theta", 1e6),
            **(given.get(FULL) or {}),
            **(config.get("rope_scaling") or {}),
        },
        SLIDING: {
            "rope_theta": config.get("rope_local_base_freq", 1e4),
            **(given.get(SLIDING) or {}),
        },
    }


FAMILY = Family("gemma3_text", decoder, (*gemma2.TENSORS, *QK_NORMS))
