"""Weights in 8-bit floats with a scale for each block, against twins that hold their numbers."""

import json
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax import models
from kvjax.models.family import parameter_paths

GOLDEN = Path(__file__).parents[1] / "golden" / "deepseek_v3_groups"
BLOCK = (8, 12)  # which divides few of the shapes
# What DeepSeek-V3 keeps as it is: embeddings, norms, routers and the head.
SCALED = re.compile(r"(self_attn|mlp).*_proj(_with_mqa)?\.weight$")


def stored() -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "model.safetensors")


def blocks(values: np.ndarray) -> list[tuple[int, int, tuple[slice, slice]]]:
    rows, columns = BLOCK
    return [
        (i, j, (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)))
        for i in range(-(-values.shape[0] // rows))
        for j in range(-(-values.shape[1] // columns))
    ]


def quantised(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, a scale for each block, and the numbers that these stand for, block by block."""
    codes = np.empty(values.shape, ml_dtypes.float8_e4m3fn)
    scales = np.empty([-(-n // size) for n, size in zip(values.shape, BLOCK, strict=True)], "f4")
    numbers = np.empty(values.shape, np.float32)
    for i, j, where in blocks(values):
        scales[i, j] = np.abs(values[where]).max().astype(np.float32) / 448
        codes[where] = values[where].astype(np.float32) / scales[i, j]
        numbers[where] = codes[where].astype(np.float32) * scales[i, j]
    return codes, scales, numbers


def write(directory: Path, tensors: dict[str, np.ndarray], **changes) -> Path:
    directory.mkdir()
    save_file(
        {name: np.ascontiguousarray(x) for name, x in tensors.items()},
        directory / "model.safetensors",
    )
    config = json.loads((GOLDEN / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    """The model's, those of its projections as codes and scales."""
    every = {}
    for name, values in stored().items():
        if SCALED.search(name):
            every[name], every[f"{name}_scale_inv"], _ = quantised(values)
        else:
            every[name] = values
    assert (
        sum(name.endswith("_scale_inv") for name in every) == 40
    )  # of attention, a dense layer, 8 experts and a shared one
    return every


@pytest.mark.parametrize("dtype", [None, "bf16", "f32"])
def test_it_loads_as_its_dequantised_twin(tensors, tmp_path, dtype):
    kind = np.float32 if dtype == "f32" else ml_dtypes.bfloat16
    twins = {
        name: quantised(x)[2].astype(kind) if SCALED.search(name) else x
        for name, x in stored().items()
    }
    scaled = write(tmp_path / "scaled", tensors, quantization_config=QUANTIZATION)
    given = parameter_paths(models.load(scaled, dtype))
    for path, twin in parameter_paths(models.load(write(tmp_path / "twin", twins), dtype)).items():
        assert given[path].dtype == twin.dtype
        np.testing.assert_array_equal(given[path], twin, err_msg=path)


def test_it_is_written_as_plain_numbers(tensors, tmp_path):
    scaled = write(tmp_path / "scaled", tensors, quantization_config=QUANTIZATION)
    models.save(models.load(scaled), tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    again, once = models.load(tmp_path / "plain"), models.load(scaled)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(again), jax.tree.leaves(once))


NAME = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("change", "quantization", "message"),
    [
        (lambda t: t.pop(f"{NAME}_scale_inv"), {}, f"{NAME} is float8_e4m3fn and has no"),
        (
            lambda t: t.update({f"{NAME}_scale_inv": np.ones((4, 3), np.float32)}),
            {},
            r"has shape \[4, 3\]; blocks of \[8, 12\] in \[32, 40\] imply \[4, 4\]",
        ),
        (lambda t: None, {"fmt": "e5m2"}, "fmt: got 'e5m2'; accepted: 'e4m3'"),
        (lambda t: None, {"weight_block_size": [128]}, "accepted: two whole numbers"),
    ],
)
def test_what_is_wrong_is_named(tensors, tmp_path, change, quantization, message):
    change(tensors)
    directory = write(tmp_path / "m", tensors, quantization_config=QUANTIZATION | quantization)
    with pytest.raises(ValueError, match=message):
        models.load(directory)
