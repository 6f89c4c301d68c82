"""Experts in checkpoints: one tensor for each or one for all of them, and what is refused."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax import models
from kvjax.models.checkpoint import Checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("mixtral_window", "qwen3_moe_dense_between")


@pytest.fixture
def change(tmp_path):
    """Copy a golden model with one file of weights, its tensors changed by a function."""

    def copy(name, edit):
        tensors = load_file(GOLDEN / name / "model.safetensors")
        edit(tensors)
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        return Path(shutil.copy(GOLDEN / name / "config.json", tmp_path / name)).parent

    return copy


def stored(directory):
    checkpoint = Checkpoint(directory)
    return {name: (checkpoint.dtype(name), checkpoint.shape(name)) for name in checkpoint.names()}


def stack(tensors, experts, part):
    """One projection of fewer than ten experts, taken out of the tensors: (E, out, in)."""
    names = sorted(n for n in tensors if n.startswith(experts) and f".{part}." in n)
    return np.stack([tensors.pop(name) for name in names])


def fuse(tensors):
    """The experts as transformers 5 has them in memory, and Mixtral's block by its name there."""
    parts = ("gate_proj", "up_proj", "down_proj")
    for name in list(tensors):
        if ".block_sparse_moe." in name:
            tensors[name.replace(".block_sparse_moe.", ".mlp.")] = tensors.pop(name)
            parts = ("w1", "w3", "w2")
    for block in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
        gate, up, down = (stack(tensors, f"{block}.experts.", part) for part in parts)
        tensors[f"{block}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{block}.experts.down_proj"] = down


@pytest.mark.parametrize("name", NAMES)
def test_experts_may_be_stored_in_one_tensor(name, change, tmp_path):
    """With save_original_format=False transformers writes them so; here they are written apart."""
    fused = change(name, fuse)
    assert any(tensor.endswith("experts.gate_up_proj") for tensor in stored(fused))
    model = models.load(fused)
    for left, right in zip(
        jax.tree.leaves(model), jax.tree.leaves(models.load(GOLDEN / name)), strict=True
    ):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    models.save(model, tmp_path / "saved")
    assert stored(tmp_path / "saved") == stored(GOLDEN / name)


def test_one_expert_is_an_axis_too(tmp_path):
    config = Checkpoint(GOLDEN / "mixtral_window").config
    model = models.init(config | {"num_local_experts": 1, "num_experts_per_tok": 1})
    models.save(model, tmp_path / "saved")
    down = models.load(tmp_path / "saved").layers[1].mlp.experts.down.kernel[...]
    np.testing.assert_array_equal(down, model.layers[1].mlp.experts.down.kernel[...])


def test_an_expert_is_missed(change):
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    with pytest.raises(ValueError, match=f"missing tensors: {name}$"):
        models.load(change("mixtral_window", lambda tensors: tensors.pop(name)))


def test_experts_in_both_forms_are_too_many(change):
    def add(tensors):
        fused = dict(tensors)
        fuse(fused)
        tensors.update({name: x for name, x in fused.items() if name.endswith("s.down_proj")})

    with pytest.raises(ValueError, match=r"unknown tensors: model.layers.0.mlp.experts.down_proj"):
        models.load(change("mixtral_window", add))


def test_a_misshapen_expert_is_named(change):
    name = "model.layers.2.mlp.experts.5.up_proj.weight"

    def cut(tensors):
        tensors[name] = tensors[name][:-1].copy()

    with pytest.raises(ValueError, match=rf"{name} has shape \[11, 32\]; .* implies \[12, 32\]"):
        models.load(change("qwen3_moe_dense_between", cut))


def test_experts_of_several_dtypes_have_one_that_holds_them_all(change):
    name = "model.layers.0.mlp.experts.5.down_proj.weight"

    def widen(tensors):
        tensors[name] = tensors[name].astype(np.float32) + 2**-20

    model = models.load(change("qwen3_moe_dense_between", widen))
    experts = model.layers[0].mlp.experts
    assert (experts.down.kernel.dtype, experts.gate_up.kernel.dtype) == (jnp.float32, jnp.bfloat16)
    golden = models.load(GOLDEN / "qwen3_moe_dense_between").layers[0].mlp.experts.down.kernel
    difference = experts.down.kernel[...] - golden[...].astype(jnp.float32)
    np.testing.assert_array_equal(difference[:5], 0)
    np.testing.assert_allclose(difference[5], 2**-20, rtol=0.2)
