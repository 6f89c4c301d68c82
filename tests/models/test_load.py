"""Loading and saving model directories: names, dtypes, shapes, and errors that name the tensor."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kvjax import models

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/ref.npz"))


def stored(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype and shape of all tensors of a directory, read by safetensors itself."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors |= {n: (v.get_dtype(), tuple(v.get_shape())) for n, v in views.items()}
    return tensors


def assert_equal_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_save_writes_what_transformers_wrote(name, tmp_path):
    model = models.load(GOLDEN / name)
    models.save(model, tmp_path / "saved")
    assert stored(tmp_path / "saved") == stored(GOLDEN / name)
    again = models.load(tmp_path / "saved")
    assert_equal_bits(model, again)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config == json.loads((GOLDEN / name / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama_mha", jnp.float32), ("llama_gqa_tied", jnp.bfloat16), ("mistral_gqa", jnp.float16)],
)
def test_the_stored_dtype_is_kept_unless_another_is_asked_for(name, dtype):
    model = models.load(GOLDEN / name)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(dtype)}
    for asked, expected in (("f32", jnp.float32), ("bf16", jnp.bfloat16), ("f16", jnp.float16)):
        model = models.load(GOLDEN / name, dtype=asked)
        assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(expected)}


def test_another_dtype_is_written_into_the_config(tmp_path):
    models.save(models.load(GOLDEN / "llama_bias", dtype="bf16"), tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert {dtype for dtype, _ in stored(tmp_path / "saved").values()} == {"BF16"}


def test_save_splits_into_shards(tmp_path):
    model = models.load(GOLDEN / "llama_mha")
    models.save(model, tmp_path / "saved", max_shard_bytes=60_000)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 3
    assert stored(tmp_path / "saved") == stored(GOLDEN / "llama_mha")
    assert_equal_bits(model, models.load(tmp_path / "saved"))


def test_save_leaves_a_directory_that_holds_something(tmp_path):
    model = models.load(GOLDEN / "gemma_mqa")
    (tmp_path / "note").write_text("mine")
    with pytest.raises(FileExistsError, match="empty directory"):
        models.save(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_load_onto_a_mesh():
    mesh = jax.make_mesh((1,), ("data",))
    model = models.load(GOLDEN / "qwen3_gqa", mesh=mesh)
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(model))
    assert_equal_bits(model, models.load(GOLDEN / "qwen3_gqa"))


@pytest.fixture
def change(tmp_path):
    """Copy a golden model with one file of weights, its tensors changed by a function."""

    def copy(name, edit):
        source, target = GOLDEN / name, tmp_path / name
        tensors = load_file(source / "model.safetensors")
        edit(tensors)
        target.mkdir()
        save_file(tensors, target / "model.safetensors")
        shutil.copy(source / "config.json", target)
        return target

    return copy


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"),
            r"missing tensors: model\.layers\.1\.self_attn\.k_proj\.bias",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.self_attn.rel": np.zeros(3)}),
            r"unknown tensors: model\.layers\.0\.self_attn\.rel",
        ),
        (
            lambda tensors: tensors.update(
                {"model.norm.weight": tensors["model.norm.weight"][:31].copy()}
            ),
            r"model\.norm\.weight has shape \[31\]; config\.json implies \[32\]",
        ),
        (
            lambda tensors: tensors.update(
                {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"].T.copy()}
            ),
            r"model\.embed_tokens\.weight has shape \[32, 96\]; config\.json implies \[96, 32\]",
        ),
    ],
    ids=["missing", "unknown", "misshapen", "transposed"],
)
def test_a_wrong_tensor_is_named(change, edit, message):
    with pytest.raises(ValueError, match=message):
        models.load(change("llama_bias", edit))


def test_both_kinds_of_wrong_names_are_told_at_once(change):
    def rename(tensors):
        tensors["model.layers.0.mlp.up.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")

    with pytest.raises(ValueError, match=r"missing.*up_proj\.weight; unknown.*up\.weight"):
        models.load(change("llama_bias", rename))


def test_a_transposed_square_conv1d_has_the_right_shape_and_a_fused_one_not(change):
    """GPT-2 stores (in, out); only logits tell for square weights (see test_golden)."""

    def transpose(tensors):
        name = "transformer.h.0.attn.c_attn.weight"
        tensors[name] = tensors[name].T.copy()

    with pytest.raises(ValueError, match=r"c_attn\.weight has shape \[192, 64\]"):
        models.load(change("gpt2_conv1d", transpose))


def test_an_output_head_beside_tied_embeddings_is_ignored(change):
    """transformers before 4.26 stored the tied weight twice."""

    def add(tensors):
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()

    assert_equal_bits(models.load(change("gpt2_conv1d", add)), models.load(GOLDEN / "gpt2_conv1d"))


def test_names_without_prefix_and_buffers_of_old_versions(change):
    """As the hub's own gpt2 is stored."""

    def rename(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 48, 48), np.float32)
        tensors["h.0.attn.masked_bias"] = np.ones((), np.float32)

    assert_equal_bits(
        models.load(change("gpt2_conv1d", rename)), models.load(GOLDEN / "gpt2_conv1d")
    )


def test_the_output_head_of_gpt_neox_has_two_names(change):
    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
        tensors["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors["gpt_neox.layers.0.attention.bias"] = np.ones((1, 1, 64, 64), bool)

    assert_equal_bits(
        models.load(change("gpt_neox_interleaved", rename)),
        models.load(GOLDEN / "gpt_neox_interleaved"),
    )


def test_a_missing_shard_is_named(tmp_path):
    shutil.copytree(GOLDEN / "llama_mha", tmp_path / "model")
    (tmp_path / "model" / "model-00003-of-00008.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00003-of-00008\.safetensors"):
        models.load(tmp_path / "model")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": None}, "model_type"),
        ({"model_type": "bert"}, "model_type='bert': accepted are .*llama"),
        ({"vocab_size": ...}, "llama lacks 'vocab_size'"),
        ({"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu': accepted are 'silu'"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads|kv_heads"),
    ],
    ids=str,
)
def test_a_wrong_config_is_named(tmp_path, fields, message):
    shutil.copytree(GOLDEN / "llama_bias", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path / "model")


def test_head_dim_is_checked_against_the_tensors(tmp_path):
    """llama_mha has 4 heads of 24 and a width of 64; without head_dim they would be of 16."""
    shutil.copytree(GOLDEN / "llama_mha", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    del config["head_dim"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"q_proj\.weight has shape \[96, 64\].*\[64, 64\]"):
        models.load(tmp_path / "model")


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype='int8': accepted are f32, bf16, f16"):
        models.load(GOLDEN / "llama_mha", dtype="int8")


def test_a_directory_that_is_not_there():
    with pytest.raises(FileNotFoundError, match="no/such/model"):
        models.load("no/such/model")


def test_an_id_of_the_hub_is_downloaded(monkeypatch):
    asked = []

    def snapshot_download(repo, allow_patterns):
        asked.append(repo)
        return str(GOLDEN / "qwen3_gqa")

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert_equal_bits(models.load("owner/name"), models.load(GOLDEN / "qwen3_gqa"))
    assert asked == ["owner/name"]


def test_an_id_of_the_hub_without_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match=r"owner/name: no such .*install kvjax\[hf\]"):
        models.load("owner/name")


def with_tensor(name: str, directory: Path) -> Path:
    """A copy of a DeepSeek-V3 of two layers that has one tensor more."""
    shutil.copytree(GOLDEN / "deepseek_v3_groups", directory)
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, name: np.zeros((2, 2), np.float32)}, directory / "model.safetensors")
    return directory


def test_a_layer_that_predicts_further_tokens_is_left_out(tmp_path):
    copy = with_tensor("model.layers.2.eh_proj.weight", tmp_path / "copy")
    assert_equal_bits(models.load(copy), models.load(GOLDEN / "deepseek_v3_groups"))


@pytest.mark.parametrize("layer", [0, 1, 20, 3])
def test_no_other_layer_is_left_out(layer, tmp_path):
    copy = with_tensor(f"model.layers.{layer}.eh_proj.weight", tmp_path / "copy")
    with pytest.raises(ValueError, match=f"unknown tensors: model.layers.{layer}.eh_proj.weight"):
        models.load(copy)


def test_what_corrects_routers_is_not_rounded(tmp_path):
    """In f32 whatever the rest is cast to, and the config says what the rest is in."""
    model = models.load(GOLDEN / "deepseek_v3_groups", dtype="bf16")
    correction = model.layers[1].mlp.correction[...]
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    stored = load_file(GOLDEN / "deepseek_v3_groups" / "model.safetensors")[name]
    assert (correction.astype(jnp.bfloat16).astype(jnp.float32) != stored).any()
    np.testing.assert_array_equal(correction, stored)
    models.save(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_quantised_checkpoint_is_refused(tmp_path):
    """gpt-oss as it is published: the experts' kernels as MXFP4 blocks and scales."""
    copy = tmp_path / "copy"
    shutil.copytree(GOLDEN / "gpt_oss_window", copy)
    tensors = load_file(copy / "model.safetensors")
    kernel = tensors.pop("model.layers.1.mlp.experts.down_proj")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_blocks"] = np.zeros((*kernel.shape[:2], 2, 16), np.uint8)
    tensors[f"{name}_scales"] = np.zeros((*kernel.shape[:2], 2), np.uint8)
    save_file(tensors, copy / "model.safetensors")
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"got quant_method 'mxfp4'; accepted: .* float.*_blocks"):
        models.load(copy)


def test_weights_of_a_quantised_config_are_saved_without_it(tmp_path):
    config = json.loads((GOLDEN / "gpt_oss_window" / "config.json").read_text())
    model = models.init(config | {"quantization_config": {"quant_method": "mxfp4"}})
    models.save(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == {
        **config,
        "dtype": "float32",
    }
