"""The families' tables: every tensor has one row, and layouts are inverse pairs."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from kvjax import models, sizing
from kvjax.models.family import Tensor, bind, parameter_paths
from kvjax.models.registry import FAMILIES, read_decoder
from kvjax.models.tensor_layout import (
    EACH_TRANSPOSED,
    GROUPED_BY_KV_HEAD,
    INTERLEAVED,
    KEYS_UP,
    PAIRS_AFTER_LATENT,
    PAIRS_IN_HEADS,
    PAIRS_IN_QUERIES,
    SAME,
    TRANSPOSED,
    VALUES_UP,
)
from kvjax.nn import AttentionConfig, LatentAttentionConfig, Rope

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/ref.npz"))
GROUPED = AttentionConfig(d_model=5, query_heads=6, kv_heads=2, key_dim=4, value_dim=4)
LATENT = LatentAttentionConfig(
    d_model=5,
    query_heads=3,
    latent_rank=5,
    rope_dim=4,
    head_dim=2,
    head_value_dim=1,
    rope=Rope(4),
)
MHA = AttentionConfig(d_model=5, query_heads=2, kv_heads=2, key_dim=2, value_dim=2)


@pytest.mark.parametrize("name", NAMES)
def test_every_stored_tensor_is_bound_once(name):
    family, config = read_decoder(json.loads((GOLDEN / name / "config.json").read_text()))
    bindings = bind(family, config)
    places = [(binding.name, binding.path) for binding in bindings]
    assert len(set(places)) == len(places)
    stored = set()
    for path in (GOLDEN / name).glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            stored |= set(file.keys())
    assert {binding.name for binding in bindings} == stored


@pytest.mark.parametrize("name", NAMES)
def test_parameters_cover_every_number_of_a_stored_tensor_once(name):
    family, config = read_decoder(json.loads((GOLDEN / name / "config.json").read_text()))
    model = nnx.eval_shape(lambda: models.init(json.loads(config.source)))
    sizes = {path: leaf.shape for path, leaf in parameter_paths(model).items()}
    covered = {}
    for binding in bind(family, config):
        stored = covered.setdefault(binding.name, np.zeros(binding.shape, np.int8))
        alone = np.zeros_like(stored)
        part = np.ones(sizes[binding.path], np.int8)[binding.region]
        binding.layout.write(part, binding.attention, alone)
        stored += alone
    assert all((times == 1).all() for times in covered.values())


@pytest.mark.parametrize("name", NAMES)
def test_stored_tensors_cover_every_number_of_a_parameter_once(name):
    family, config = read_decoder(json.loads((GOLDEN / name / "config.json").read_text()))
    model = nnx.eval_shape(lambda: models.init(json.loads(config.source)))
    covered = {path: np.zeros(leaf.shape, int) for path, leaf in parameter_paths(model).items()}
    for binding in bind(family, config):
        part = covered[binding.path][binding.region]
        assert binding.layout.shape(part.shape, binding.attention) == binding.shape
        covered[binding.path][binding.region] = part + 1
    assert all((times == 1).all() for times in covered.values())


@pytest.mark.parametrize("name", NAMES)
def test_sizing_counts_the_parameters(name):
    config = json.loads((GOLDEN / name / "config.json").read_text())
    leaves = parameter_paths(nnx.eval_shape(lambda: models.init(config)))
    # What corrects routers is a buffer in transformers, and not counted.
    counted = [leaf.size for path, leaf in leaves.items() if not path.endswith(".correction")]
    assert sum(counted) == sizing.load(config).parameters


def test_the_golden_files_cover_every_family():
    found = {
        json.loads((GOLDEN / name / "config.json").read_text())["model_type"] for name in NAMES
    }
    # transformers has no class for these.
    assert found == {name for name in FAMILIES if not name.startswith("kvjax_")} - {"kimi_k2"}


def test_kimi_k2_is_deepseek_v3():
    config = json.loads((GOLDEN / "deepseek_v3_groups" / "config.json").read_text())
    family, decoder = read_decoder({**config, "model_type": "kimi_k2"})
    same, named = read_decoder(config)
    assert (family.tensors, replace(decoder, source="")) == (
        same.tensors,
        replace(named, source=""),
    )


def written(layout, parameter, attention):
    stored = np.empty(layout.shape(parameter.shape, attention), parameter.dtype)
    layout.write(parameter, attention, stored)
    return stored


@pytest.mark.parametrize(
    "layout", [SAME, TRANSPOSED, GROUPED_BY_KV_HEAD, INTERLEAVED, PAIRS_IN_HEADS]
)
@pytest.mark.parametrize("rows", [(), (5,)], ids=["bias", "kernel"])
@pytest.mark.parametrize("attention", [GROUPED, MHA], ids=["grouped", "mha"])
def test_layouts_are_inverse_pairs(layout, rows, attention):
    shape = (*rows, sum(attention.qkv_widths))
    parameter = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    stored = written(layout, parameter, attention)
    np.testing.assert_array_equal(layout.read(stored, attention), parameter)


@pytest.mark.parametrize(
    ("layout", "width"), [(PAIRS_IN_QUERIES, 3 * (2 + 4)), (PAIRS_AFTER_LATENT, 5 + 4)]
)
@pytest.mark.parametrize("rows", [(), (5,)], ids=["bias", "kernel"])
def test_layouts_of_latents_are_inverse_pairs(layout, width, rows):
    parameter = np.arange(np.prod((*rows, width)), dtype=np.float32).reshape(*rows, width)
    stored = written(layout, parameter, LATENT)
    np.testing.assert_array_equal(layout.read(stored, LATENT), parameter)


def test_pairs_of_queries_are_side_by_side_after_what_is_not_rotated():
    stored = np.array([f"{head}{i}" for head in "012" for i in ("a", "b", "0", "0'", "1", "1'")])
    canonical = PAIRS_IN_QUERIES.read(stored, LATENT)
    assert " ".join(canonical[6:12]) == "1a 1b 10 11 10' 11'"


def test_ways_up_to_keys_and_values_share_a_tensor():
    """Of each head in turn: rows of its keys, then rows of its values."""
    stored = np.array([[f"{part}{c}" for c in range(5)] for part in ("k0", "k1", "v0") * 3])
    stored = np.char.add(np.repeat(["a", "b", "c"], 3)[:, None], stored)
    keys, values = KEYS_UP.read(stored, LATENT), VALUES_UP.read(stored, LATENT)
    assert keys.shape == (3, 2, 5)
    assert values.shape == (3, 5, 1)
    assert keys[1, 1, 3] == "bk13"
    assert values[2, 4, 0] == "cv04"
    together = np.empty_like(stored)
    KEYS_UP.write(keys, LATENT, together)
    VALUES_UP.write(values, LATENT, together)
    np.testing.assert_array_equal(together, stored)


def test_parts_of_experts():
    row = Tensor("{i}.w3.{e}", "layers.{i}.up", TRANSPOSED, half=1)
    parameter = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    parts = {name: parameter[region].tolist() for name, region in row.parts(parameter.shape)}
    assert parts == {
        "{i}.w3.0": [[2, 3], [6, 7], [10, 11]],
        "{i}.w3.1": [[14, 15], [18, 19], [22, 23]],
    }


def test_a_linear_layer_of_each_expert():
    parameter = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    stored = written(EACH_TRANSPOSED, parameter, None)
    assert stored.shape == (2, 4, 3)
    np.testing.assert_array_equal(stored[1], parameter[1].T)
    np.testing.assert_array_equal(EACH_TRANSPOSED.read(stored, None), parameter)


def test_rows_of_neox_are_q_k_v_of_one_head_after_another():
    stored = np.array([f"{part}{head}{i}" for head in "01" for part in "qkv" for i in "ab"])
    canonical = GROUPED_BY_KV_HEAD.read(stored, MHA)
    assert " ".join(canonical) == "q0a q0b q1a q1b k0a k0b k1a k1b v0a v0b v1a v1b"


def test_rows_of_fewer_kv_heads_are_their_queries_then_k_then_v():
    heads = ["q0", "q1", "q2", "k0", "v0", "q3", "q4", "q5", "k1", "v1"]
    stored = np.array([f"{head}.{i}" for head in heads for i in range(4)])
    canonical = GROUPED_BY_KV_HEAD.read(stored, GROUPED)
    order = ["q0", "q1", "q2", "q3", "q4", "q5", "k0", "k1", "v0", "v1"]
    assert canonical.tolist() == [f"{head}.{i}" for head in order for i in range(4)]


def test_interleaved_halves_and_pairs():
    stored = np.array(["g0", "u0", "g1", "u1", "g2", "u2"])
    assert " ".join(INTERLEAVED.read(stored, None)) == "g0 g1 g2 u0 u1 u2"
    rows = np.array([f"{head}{i}" for head in "ab" for i in range(4)])
    assert " ".join(PAIRS_IN_HEADS.read(rows, GROUPED)) == "a0 a2 a1 a3 b0 b2 b1 b3"


@pytest.mark.parametrize("name", ["gpt2_conv1d", "gpt_neox_interleaved"])
def test_grouped_forms_that_only_this_library_reads(name, tmp_path):
    config = json.loads((GOLDEN / name / "config.json").read_text())
    config |= {"model_type": f"kvjax_{config['model_type']}", "num_key_value_heads": 2}
    model = models.init(config, seed=3)
    widths = (4 + 2 + 2) * 16
    assert model.layers[0].attention.qkv.kernel.shape == (64, widths)
    models.save(model, tmp_path / "saved")
    again = models.load(tmp_path / "saved")
    for left, right in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("name", NAMES)
def test_init_makes_the_shapes_of_the_checkpoint(name):
    config = json.loads((GOLDEN / name / "config.json").read_text())
    loaded = parameter_paths(models.load(GOLDEN / name))
    made = parameter_paths(nnx.eval_shape(lambda: models.init(config, dtype="bf16")))
    assert {path: leaf.shape for path, leaf in made.items()} == {
        path: leaf.shape for path, leaf in loaded.items()
    }
    wide = {path for path, leaf in made.items() if leaf.dtype == jnp.float32}
    assert wide == {path for path in made if path.endswith(".correction")}
    narrow = {leaf.dtype for path, leaf in made.items() if path not in wide}
    assert narrow == {jnp.dtype(jnp.bfloat16)}


def test_init_follows_its_seed():
    config = json.loads((GOLDEN / "llama_bias" / "config.json").read_text())
    first, same, other = (models.init(config, seed=seed).head.kernel[...] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, same)
    assert np.abs(first - other).max() > 1e-3
