"""Reading the fields of config.json that do not shape the cache (those belong to kvjax.sizing)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvjax.nn import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling

# Kinds of layers, as `layer_types` spells them.
FULL, SLIDING = "full_attention", "sliding_attention"

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def choose(field: str, given: Any, accepted: Mapping[Any, Any]) -> Any:
    """accepted[given], or a ValueError that lists what is accepted."""
    if given not in accepted:
        raise ValueError(f"{field}={given!r}: accepted are {', '.join(map(repr, accepted))}")
    return accepted[given]


def read_activation(config: dict, field: str, default: str) -> str:
    return choose(field, config.get(field, default), ACTIVATION_NAMES)


def read_rope(
    config: dict,
    head_dim: int,
    *,
    kind: str = FULL,
    theta_field: str = "rope_theta",
    rotary_fraction: float = 1.0,
) -> Rope:
    """The rotary embedding of a config, in the old spelling (rope_theta, rope_scaling) or the new.

    Args:
      config: config.json; `rope_parameters` (transformers 5) may hold all of it, or all of it for
        each kind of layer.
      head_dim: H.
      kind: the kind of layer, as `layer_types` spells it.
      theta_field: the old spelling of the base.
      rotary_fraction: share of H that is rotated where the config does not say.
    """
    parameters = {"rope_theta": config.get(theta_field), **_rope_parameters(config, kind)}
    fraction = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    dim = int(head_dim * (rotary_fraction if fraction is None else fraction))
    theta = float(parameters.get("rope_theta") or 10000.0)
    scaling = choose("rope_type", _rope_type(parameters), SCALINGS)(parameters, config)
    return Rope(dim, theta, scaling)


def read_yarn_temperature(config: dict) -> float:
    """What DeepSeek multiplies the softmax scale by the square of, where `mscale_all_dim` is given.

    That is YaRN's temperature, which its RoPE then leaves to the scores.
    """
    parameters = _rope_parameters(config, FULL)
    weight = parameters.get("mscale_all_dim")
    if _rope_type(parameters) == "default" or not weight:
        return 1.0
    return _mscale(parameters["factor"], weight)


def _rope_parameters(config: dict, kind: str) -> dict:
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if kinds := [name for name, value in given.items() if isinstance(value, dict)]:
        if kind not in kinds:
            raise ValueError(
                f"rope_parameters: got those of {', '.join(kinds)}; accepted: those of {kind} too"
            )
        given = given[kind]
    return given


def _rope_type(parameters: dict) -> str:
    return parameters.get("rope_type", parameters.get("type", "default"))


def _original_positions(parameters: dict, config: dict) -> int:
    # Where both the config and its RoPE fields have it, the config's own counts.
    name = "original_max_position_embeddings"
    return config.get(name) or parameters.get(name) or config["max_position_embeddings"]


def _linear(parameters: dict, config: dict) -> LinearScaling:
    return LinearScaling(parameters["factor"])


def _llama3(parameters: dict, config: dict) -> Llama3Scaling:
    return Llama3Scaling(
        factor=parameters["factor"],
        low_freq_factor=parameters["low_freq_factor"],
        high_freq_factor=parameters["high_freq_factor"],
        original_max_positions=_original_positions(parameters, config),
    )


def _yarn(parameters: dict, config: dict) -> YarnScaling:
    original = _original_positions(parameters, config)
    factor = parameters.get("factor") or config["max_position_embeddings"] / original
    magnitude = parameters.get("attention_factor")
    over, under = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if magnitude is None and over and under:
        magnitude = _mscale(factor, over) / _mscale(factor, under)
    elif magnitude is None:
        magnitude = _mscale(factor)
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        magnitude=magnitude,
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        truncate=parameters.get("truncate", True),
    )


def _longrope(parameters: dict, config: dict) -> LongRopeScaling:
    original, longest = _original_positions(parameters, config), config["max_position_embeddings"]
    if longest > original:
        raise ValueError(
            f"max_position_embeddings: got {longest} with longrope, whose frequencies change for "
            f"all positions once a text is longer than {original}; accepted: up to {original}"
        )
    factor = parameters.get("factor") or longest / original
    magnitude = parameters.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(tuple(parameters["short_factor"]), magnitude)


def _mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's temperature, 0.1 ln(factor) + 1 (arXiv:2309.00071, equation 22), with a weight."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


SCALINGS = {
    "default": lambda parameters, config: None,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
