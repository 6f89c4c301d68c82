"""Scales of 8-bit float caches beside a model: a small JSON file, or tensors of its checkpoint."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.cache.scales import STATIC, LayerScales, Scales, static_codec
from kvjax.models.checkpoint import SCALES_FILE, Checkpoint

FORMAT = 1  # of the file

# Names of vLLM's and compressed-tensors' scales: one number by which e4m3 codes are multiplied, or
# one a KV head. A query's scale in such checkpoints is one for all heads and is not read.
TENSOR = re.compile(r"\blayers\.(\d+)\.self_attn\.([qkv]_scale)$")


def save_scales(scales: Scales, model_dir: str | os.PathLike[str]) -> Path:
    """Write kv_cache_scales.json into a model directory, whole or not at all; returns its path.

    Raises:
      OSError: it cannot be written; a file that was there stays as it was.
    """
    path = Path(model_dir) / SCALES_FILE
    content = {
        "format": FORMAT,
        "codec": scales.codec,
        "source": scales.source,
        "tokens": scales.tokens,
        "percentile": scales.percentile,
        "layers": [None if layer is None else _lists(layer) for layer in scales.layers],
    }
    partial = path.with_name(f".{SCALES_FILE}.partial-{secrets.token_hex(4)}")
    try:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


def load_scales(model_dir: str | os.PathLike[str]) -> Scales | None:
    """The scales of kv_cache_scales.json, or else those that the checkpoint carries; or None.

    Raises:
      ValueError: naming the file and its field, or the tensor, that is missing or wrong.
    """
    path = Path(model_dir) / SCALES_FILE
    if not path.is_file():
        return _stored(Checkpoint(model_dir))
    try:
        return _parsed(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:  # of JSON and Unicode, too
        raise ValueError(f"{path}: {error}") from None


def _lists(layer: LayerScales) -> dict[str, Any]:
    named = {"k_scale": layer.k_scale, "v_scale": layer.v_scale, "q_scale": layer.q_scale}
    return {name: scale.tolist() for name, scale in named.items() if scale is not None}


def _parsed(content: Any) -> Scales:
    head = _fields("file", content, ("format", "codec", "source", "tokens", "percentile", "layers"))
    if head["format"] != FORMAT:
        raise ValueError(f"format: got {head['format']!r}; accepted: {FORMAT}")
    if head["codec"] not in STATIC:
        raise ValueError(f"codec: got {head['codec']!r}; accepted: {', '.join(STATIC)}")
    if not isinstance(head["source"], str):
        raise ValueError(f"source: got {head['source']!r}; accepted: text")
    if type(head["tokens"]) is not int or head["tokens"] < 1:
        raise ValueError(f"tokens: got {head['tokens']!r}; accepted: a whole number, at least 1")
    percentile = head["percentile"]
    if percentile is not None and (
        type(percentile) not in (int, float) or not 0 <= percentile <= 100
    ):
        raise ValueError(f"percentile: got {percentile!r}; accepted: 0 to 100, or null")
    if not isinstance(head["layers"], list) or not head["layers"]:
        raise ValueError(f"layers: got {head['layers']!r}; accepted: a list, one entry a layer")
    per_head = static_codec(head["codec"]).per_head
    layers = tuple(_layer(f"layers[{i}]", x, per_head) for i, x in enumerate(head["layers"]))
    return Scales(head["codec"], layers, head["source"], head["tokens"], percentile)


def _fields(where: str, content: Any, names: tuple[str, ...], also: tuple[str, ...] = ()) -> dict:
    """An object with just these fields, those of `also` if it likes."""
    if not isinstance(content, dict):
        raise ValueError(f"{where}: got {content!r}; accepted: an object with {', '.join(names)}")
    for name in names:
        if name not in content:
            raise ValueError(f"{where}: got no {name}; accepted: {', '.join((*names, *also))}")
    for name in content:
        if name not in (*names, *also):
            raise ValueError(f"{where}: got {name}; accepted: {', '.join((*names, *also))}")
    return content


def _layer(where: str, content: Any, per_head: bool) -> LayerScales | None:
    if content is None:
        return None
    found = _fields(where, content, ("k_scale", "v_scale"), ("q_scale",))
    k, v = (_array(f"{where}.{name}", found[name], per_head) for name in ("k_scale", "v_scale"))
    q = _array(f"{where}.q_scale", found["q_scale"], True) if "q_scale" in found else None
    return LayerScales(k, v, q)


def _array(where: str, content: Any, many: bool) -> np.ndarray:
    numbers = content if many and isinstance(content, list) else [content]
    if many is not isinstance(content, list) or any(type(x) not in (int, float) for x in numbers):
        wanted = "a list of numbers, one a head" if many else "a number"
        raise ValueError(f"{where}: got {content!r}; accepted: {wanted}")
    # What float32 cannot hold becomes infinite or 0, which no scale may be.
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(content, np.float64).astype(np.float32)


def _stored(checkpoint: Checkpoint) -> Scales | None:
    """Scales among the checkpoint's tensors."""
    found: dict[int, dict[str, np.ndarray]] = {}
    for name in checkpoint.names():
        match = TENSOR.search(name)
        if match and match[2] != "q_scale":
            scale = checkpoint.read(name).astype(np.float32).reshape(-1)
            found.setdefault(int(match[1]), {})[match[2]] = scale
    if not found:
        return None
    for i, layer in found.items():
        for name in {"k_scale", "v_scale"} - layer.keys():
            raise ValueError(
                f"{checkpoint.directory}: got no layers.{i}.self_attn.{name}; accepted: both, a "
                f"k_scale and a v_scale"
            )
    per_head = any(scale.size > 1 for layer in found.values() for scale in layer.values())

    def of_layer(layer: dict[str, np.ndarray]) -> LayerScales:
        k, v = layer["k_scale"], layer["v_scale"]
        return LayerScales(k, v) if per_head else LayerScales(k[..., 0], v[..., 0])

    layers = tuple(of_layer(found[i]) if i in found else None for i in range(max(found) + 1))
    codec = "fp8_e4m3_head" if per_head else "fp8_e4m3"
    return Scales(codec, layers, "the checkpoint", 0)
