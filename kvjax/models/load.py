"""From a Hugging Face model directory to a decoder, and back."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.cache.codecs import DTYPES
from kvjax.models.block_scaled import BlockScaledCheckpoint, is_block_scaled
from kvjax.models.cache_scales import TENSOR
from kvjax.models.checkpoint import Checkpoint, CheckpointWriter, TensorSpec, split_into_shards
from kvjax.models.family import (
    Binding,
    Family,
    abstract_decoder,
    bind,
    match,
    parameter_paths,
    path_name,
)
from kvjax.models.registry import read_decoder
from kvjax.nn import Decoder, DecoderConfig


def load(
    model_dir: str | os.PathLike[str], dtype: str | None = None, mesh: Mesh | None = None
) -> Decoder:
    """Read a model, one tensor at a time.

    Args:
      model_dir: a directory with config.json and safetensors (sharded or single), or, where
        huggingface_hub is installed, the id of a model on the Hub.
      dtype: "f32", "bf16" or "f16" for all parameters; None keeps what is stored, and reads weights
        in 8-bit floats with a scale for each block (DeepSeek-V3) in bf16.
      mesh: devices to hold a full copy each; None means the default device alone.

    Raises:
      FileNotFoundError: naming the directory, file or shard that is not there.
      ValueError: naming the field or tensor that is unknown, missing, misshapen or damaged.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: accepted are {', '.join(DTYPES)}")
    checkpoint = _open(find_model(model_dir), dtype)
    family, config = read_decoder(checkpoint.config)
    bindings = _match(checkpoint, family, config)
    check_shapes(checkpoint, bindings)
    place = None if mesh is None else NamedSharding(mesh, PartitionSpec())

    parts: dict[str, list[Binding]] = defaultdict(list)
    for binding in bindings:
        parts[binding.path].append(binding)

    def read(keys: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        array = _read_parameter(checkpoint, parts[path_name(keys)], leaf.shape)
        if dtype is not None:
            array = array.astype(leaf.dtype)
        return jax.device_put(np.ascontiguousarray(array), place)

    # Some parameters stay in f32 whatever the others are in, which the leaves tell.
    like = abstract_decoder(config, DTYPES[dtype or "f32"])
    return jax.tree_util.tree_map_with_path(read, like)


def init(config: dict, seed: int = 0, dtype: str = "f32") -> Decoder:
    """A model with random weights, of the shape that a config.json (as a dict) describes."""
    return Decoder(read_decoder(config)[1], dtype=DTYPES[dtype], rngs=nnx.Rngs(seed))


def save(
    model: Decoder, model_dir: str | os.PathLike[str], max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write a model as a directory that transformers, too, can load.

    config.json is the one the model was read from, with its dtype and without its
    quantization_config; tokenizer files are not part of a model
    (`kvjax.models.checkpoint.copy_side_files` copies them). The directory appears whole or not at
    all.

    Raises:
      FileExistsError: model_dir exists and is not empty.
    """
    source = json.loads(model.config.source)
    family, config = read_decoder(source)
    bindings, parameters = bind(family, config), parameter_paths(model)
    held: dict[str, list[Binding]] = defaultdict(list)
    for binding in bindings:
        held[binding.name].append(binding)
    specs = [
        TensorSpec(name, np.dtype(parameters[parts[0].path].dtype), parts[0].shape)
        for name, parts in held.items()
    ]
    source["torch_dtype" if "torch_dtype" in source else "dtype"] = _dtype_of(model, config)
    source.pop("quantization_config", None)  # of the weights that were published, not of these
    with CheckpointWriter(model_dir, split_into_shards(specs, max_shard_bytes), source) as writer:
        for spec in specs:
            stored = np.empty(spec.shape, spec.dtype)
            for part in held[spec.name]:
                values = np.asarray(parameters[part.path])[part.region]
                part.layout.write(values, part.attention, stored)
            writer.write(spec.name, stored)


def _dtype_of(model: Decoder, config: DecoderConfig) -> str:
    """The dtype of all parameters that are not in f32 whatever the others are in; of mixed, f32."""
    like = parameter_paths(abstract_decoder(config, jnp.bfloat16))
    dtypes = {
        np.dtype(leaf.dtype).name
        for path, leaf in parameter_paths(model).items()
        if like[path].dtype == jnp.bfloat16
    }
    return dtypes.pop() if len(dtypes) == 1 else "float32"


def _open(directory: Path, dtype: str | None) -> Checkpoint:
    checkpoint = Checkpoint(directory)
    if not is_block_scaled(checkpoint.config):
        return checkpoint
    return BlockScaledCheckpoint(directory, DTYPES[dtype or "bf16"])


def _read_parameter(
    checkpoint: Checkpoint, bindings: list[Binding], shape: tuple[int, ...]
) -> np.ndarray:
    """A parameter of this shape, put together where it is stored as several tensors."""
    first = bindings[0]
    if not first.region:
        return first.layout.read(checkpoint.read(first.name), first.attention)
    parameter = np.empty(shape, np.result_type(*{checkpoint.dtype(b.name) for b in bindings}))
    for part in bindings:
        stored = checkpoint.view(part.name)
        parameter[part.region] = part.layout.read(stored, part.attention)
    return parameter


def _match(checkpoint: Checkpoint, family: Family, config: DecoderConfig) -> tuple[Binding, ...]:
    """`match`, which says so where it fails because the checkpoint is quantised.

    Scales of its cache are no parameters: `kvjax.models.cache_scales` reads them.
    """
    names = [name for name in checkpoint.names() if not TENSOR.search(name)]
    try:
        return match(family, config, names)
    except ValueError as error:
        quantised = checkpoint.config.get("quantization_config")
        if not quantised:
            raise
        raise ValueError(
            f"quantization_config: got quant_method {quantised.get('quant_method')!r}; accepted: "
            "checkpoints of float tensors, such as transformers saves of the dequantised model "
            f"({error})"
        ) from None


def check_shapes(checkpoint: Checkpoint, bindings: Iterable[Binding]) -> None:
    """ValueError naming the first tensor whose shape is not the one that config.json implies."""
    for binding in bindings:
        stored = checkpoint.shape(binding.name)
        if stored != binding.shape:
            raise ValueError(
                f"tensor {binding.name} has shape {list(stored)}; config.json implies "
                f"{list(binding.shape)}"
            )


def find_model(model_dir: str | os.PathLike[str]) -> Path:
    """The directory of a model, downloaded first where it is the id of one on the Hub."""
    path = Path(model_dir)
    if path.exists() or str(model_dir).count("/") != 1 or str(model_dir).startswith((".", "/")):
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FileNotFoundError(
            f"{model_dir}: no such directory; to read it from the Hugging Face Hub, "
            "install kvjax[hf]"
        ) from None
    return Path(
        snapshot_download(
            str(model_dir),
            allow_patterns=["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model"],
        )
    )
