"""Model directories on disk, held against safetensors' own reader and writer."""

import json
import mmap
import resource

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from kvjax.models.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    TensorSpec,
    copy_side_files,
    split_into_shards,
)

DTYPES = [
    *(np.float64, np.float32, np.float16, np.complex64, np.bool),
    *(np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16, np.uint8),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu),
]
CONFIG = {"model_type": "llama"}
INDEX = "model.safetensors.index.json"


def spec_of(name, values):
    return TensorSpec(name, values.dtype, values.shape)


def tensor(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def write(dst, *shards):
    """Writes dicts of arrays, one per shard."""
    plan = [[spec_of(*item) for item in shard.items()] for shard in shards]
    with CheckpointWriter(dst, plan, CONFIG) as writer:
        for shard in shards:
            for name, values in shard.items():
                writer.write(name, values)


def write_sharded(directory):
    """Two shards with an index, the files made by safetensors itself."""
    directory.mkdir()
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file({"a": tensor(3, 4), "b": tensor(5)}, directory / first)
    save_file({"c": tensor(2, 2)}, directory / second)
    weight_map = {"a": first, "b": first, "c": second}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def header_of(length=0, **entries):
    """A file's start, made by hand: name -> (dtype, shape, data_offsets), padded to a length."""
    keys = ("dtype", "shape", "data_offsets")
    text = json.dumps({name: dict(zip(keys, e, strict=True)) for name, e in entries.items()})
    text = text.ljust(length - 8)
    return len(text).to_bytes(8, "little") + text.encode()


def edit_index(directory, change):
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def test_reads_what_safetensors_wrote_in_every_dtype(tmp_path):
    tensors = {np.dtype(d).name: np.arange(6).reshape(2, 3).astype(d) for d in DTYPES}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint.names()) == set(tensors)
    for name, expected in tensors.items():
        found = checkpoint.read(name)
        assert checkpoint.dtype(name) == found.dtype == expected.dtype
        assert checkpoint.shape(name) == (2, 3)
        assert found.tobytes() == expected.tobytes()
        assert checkpoint.view(name).tobytes() == expected.tobytes()


def test_safetensors_reads_what_was_written_in_every_dtype(tmp_path):
    tensors = {np.dtype(d).name: np.arange(6).reshape(2, 3).astype(d) for d in DTYPES}
    write(tmp_path / "dst", tensors)
    content = (tmp_path / "dst/model.safetensors").read_bytes()
    save_file(tensors, tmp_path / "expected")
    expected = dict(safetensors.deserialize((tmp_path / "expected").read_bytes()))
    assert dict(safetensors.deserialize(content)) == expected
    assert int.from_bytes(content[:8], "little") % 8 == 0
    with safetensors.safe_open(tmp_path / "dst/model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_scalars_empty_and_transposed_tensors(tmp_path):
    tensors = {"scalar": np.float32(7.0), "empty": np.zeros((0, 4), np.float32)}
    tensors = {name: np.asarray(values) for name, values in tensors.items()}
    tensors["transposed"] = tensor(3, 5, dtype=ml_dtypes.bfloat16).T
    write(tmp_path / "dst", tensors)
    checkpoint = Checkpoint(tmp_path / "dst")
    for name, expected in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), expected, strict=True)


def test_empty_tensor_where_a_page_starts(tmp_path):
    content = header_of(length=mmap.PAGESIZE, empty=("F32", [0, 4], [0, 0]))
    (tmp_path / "model.safetensors").write_bytes(content)
    assert Checkpoint(tmp_path).read("empty").shape == (0, 4)


def test_offsets_are_aligned_where_dtypes_mix(tmp_path):
    write(tmp_path / "dst", {"a": tensor(3, dtype=ml_dtypes.bfloat16), "b": tensor(3)})
    assert Checkpoint(tmp_path / "dst").view("b").flags.aligned


def test_sharded_directory_is_read_and_its_sharding_kept(tmp_path):
    source = Checkpoint(write_sharded(tmp_path / "src"))
    assert [[spec.name for spec in shard] for shard in source.shards] == [["a", "b"], ["c"]]
    with CheckpointWriter(tmp_path / "dst", source.shards, CONFIG) as writer:
        for name in reversed(source.names()):
            writer.write(name, source.view(name))
    for file in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        expected = safetensors.deserialize((tmp_path / "src" / file).read_bytes())
        found = safetensors.deserialize((tmp_path / "dst" / file).read_bytes())
        assert dict(found) == dict(expected)
    assert Checkpoint(tmp_path / "dst").config["model_type"] == "llama"


def test_index_lists_what_was_written_after_heads_shrank(tmp_path):
    shards = {"q": tensor(8, 8), "k": tensor(2, 8)}, {"v": tensor(2, 8), "o": tensor(8, 8)}
    write(tmp_path / "dst", *shards)
    index = json.loads((tmp_path / "dst" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * (64 + 16 + 16 + 64)
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert index["weight_map"] == {"q": files[0], "k": files[0], "v": files[1], "o": files[1]}
    names = {path.name for path in (tmp_path / "dst").iterdir()}
    assert names == {*files, INDEX, "config.json"}


def test_single_file_has_no_index(tmp_path):
    write(tmp_path / "dst", {"a": tensor(2)})
    assert {p.name for p in (tmp_path / "dst").iterdir()} == {"model.safetensors", "config.json"}


def test_read_gives_own_memory_and_view_none(tmp_path):
    save_file({"a": tensor(4)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    checkpoint.read("a")[:] = 0
    with pytest.raises(ValueError, match="read-only"):
        checkpoint.view("a")[:] = 0
    np.testing.assert_array_equal(checkpoint.read("a"), tensor(4))


def test_one_tensor_is_read_from_a_file_larger_than_memory(tmp_path):
    huge = 2**40
    header = header_of(huge=("U8", [huge], [0, huge]), last=("U8", [1], [huge, huge + 1]))
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(header)
        file.seek(huge, 1)  # leaves a hole, which takes no space
        file.write(b"\x07")
    assert Checkpoint(tmp_path).read("last").tolist() == [7]


def test_unknown_tensor_is_named(tmp_path):
    checkpoint = Checkpoint(write_sharded(tmp_path / "src"))
    assert "a" in checkpoint
    assert "nope" not in checkpoint
    with pytest.raises(KeyError, match=r"src holds no tensor 'nope'"):
        checkpoint.read("nope")


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_truncated_file_is_named(tmp_path, keep):
    path = tmp_path / "model.safetensors"
    save_file({"a": tensor(3, 4)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        Checkpoint(tmp_path)


def test_dtype_without_an_array_is_named(tmp_path):
    content = header_of(a=("F4", [4], [0, 2])) + b"\x12\x34"
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"tensor a has dtype F4; accepted: F64, F32, F16, BF16"):
        Checkpoint(tmp_path)


def test_missing_shard_is_named(tmp_path):
    directory = write_sharded(tmp_path / "src")
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="missing shards: model-00002-of-00002"):
        Checkpoint(directory)


def test_index_and_shards_that_disagree_are_named(tmp_path):
    first = "model-00001-of-00002.safetensors"
    directory = write_sharded(tmp_path / "src")
    edit_index(directory, lambda weight_map: weight_map.update(d=first))
    with pytest.raises(ValueError, match=r"index\.json but not in the shard it names: d \(model"):
        Checkpoint(directory)
    edit_index(directory, lambda weight_map: [weight_map.pop(name) for name in "bd"])
    with pytest.raises(ValueError, match=r"in a shard but not in .*index\.json: b \(model-00001"):
        Checkpoint(directory)


def test_tensor_stored_in_two_shards_is_named(tmp_path):
    directory = write_sharded(tmp_path / "src")
    save_file({"c": tensor(2), "a": tensor(3)}, directory / "model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"in a shard but not in .*: a \(model-00002"):
        Checkpoint(directory)


def test_broken_index_is_named_with_its_line(tmp_path):
    (tmp_path / INDEX).write_text('{\n"weight_map": {"a": }\n}')
    with pytest.raises(ValueError, match=r"index\.json, line 2, column 21"):
        Checkpoint(tmp_path)
    for text in ("{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(ValueError, match=r"index\.json has no weight_map"):
            Checkpoint(tmp_path)


def test_directory_without_safetensors_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a directory"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds neither model\.safetensors nor"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"only pytorch_model\.bin; convert it"):
        Checkpoint(tmp_path)


PLAN = [[TensorSpec("a", np.dtype(np.float32), (64, 64))], [TensorSpec("b", np.dtype("u1"), (2,))]]


def test_full_disk_leaves_nothing(tmp_path):
    # A limit on the size of files fails a write half-way, as a full disk does.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"while writing tensor a; .*dst was not made"):
            write(tmp_path / "dst", {"b": tensor(2)}, {"a": tensor(64, 64)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_failing_to_start_leaves_nothing(tmp_path):
    plan = [[TensorSpec("a", np.dtype(ml_dtypes.int4), (4,))]]
    with (
        pytest.raises(ValueError, match="tensor a: safetensors has no dtype int4"),
        CheckpointWriter(tmp_path / "dst", plan, CONFIG),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_interrupted_block_leaves_nothing(tmp_path):
    def interrupted():
        with CheckpointWriter(tmp_path / "new/dst", PLAN, CONFIG) as writer:
            writer.write("b", np.zeros(2, np.uint8))
            assert not (tmp_path / "new").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_incomplete_checkpoint_leaves_nothing(tmp_path):
    with (
        pytest.raises(ValueError, match="planned but not written: a"),
        CheckpointWriter(tmp_path / "dst", PLAN, CONFIG) as writer,
    ):
        writer.write("b", np.zeros(2, np.uint8))
    assert not list(tmp_path.iterdir())


def test_tensors_off_the_plan_are_refused(tmp_path):
    with CheckpointWriter(tmp_path / "dst", PLAN, CONFIG) as writer:
        with pytest.raises(ValueError, match=r"tensor b is int8\[2\], planned as uint8\[2\]"):
            writer.write("b", np.zeros(2, np.int8))
        with pytest.raises(ValueError, match=r"tensor a is float32\[4096\], planned as .*64, 64"):
            writer.write("a", np.zeros(4096, np.float32))
        with pytest.raises(ValueError, match="tensor c is not in the plan"):
            writer.write("c", np.zeros(2))
        writer.write("b", np.zeros(2, np.uint8))
        with pytest.raises(ValueError, match="tensor b is already written"):
            writer.write("b", np.zeros(2, np.uint8))
        writer.write("a", np.zeros((64, 64), np.float32))


def test_destination_must_be_new_or_empty(tmp_path, monkeypatch):
    tensors = {"a": tensor(2)}
    write(tmp_path / "new/dst", tensors)
    before = {path: path.read_bytes() for path in (tmp_path / "new/dst").iterdir()}
    with pytest.raises(FileExistsError, match="dst exists already; name a new or an empty dir"):
        write(tmp_path / "new/dst", {"a": tensor(2, seed=1)})
    assert {path: path.read_bytes() for path in (tmp_path / "new/dst").iterdir()} == before
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file exists already"):
        write(tmp_path / "file", tensors)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", tensors)
    assert Checkpoint(tmp_path / "empty").names() == ("a",)
    (tmp_path / "mount").mkdir()
    monkeypatch.setattr("pathlib.Path.is_mount", lambda path: path.name == "mount")
    with pytest.raises(FileExistsError, match="mount is a mount point; name a directory below"):
        write(tmp_path / "mount", tensors)


def test_split_into_shards():
    specs = [TensorSpec(str(n), np.dtype(np.uint8), (n,)) for n in (20, 4, 6, 1, 9)]
    shards = split_into_shards(specs, max_shard_bytes=10)
    assert [[spec.nbytes for spec in shard] for shard in shards] == [[20], [4, 6], [1, 9]]
    assert split_into_shards(specs) == [specs]


def test_side_files_are_copied_and_weights_are_not(tmp_path):
    src, dst = write_sharded(tmp_path / "src"), tmp_path / "dst"
    side = ["tokenizer.json", "vocab.txt", "chat_template.jinja", "LICENSE", ".gitattributes"]
    other = ["config.json", "pytorch_model.bin", "pytorch_model.bin.index.json", "optimizer.pt"]
    for name in side + other:
        (src / name).write_text(name)
    for folder in ("additional_chat_templates", "onnx"):
        (src / folder).mkdir()
        (src / folder / "tool_use.jinja").touch()
    dst.mkdir()
    copy_side_files(src, dst)
    assert {path.name for path in dst.iterdir()} == {*side, "additional_chat_templates"}
    assert all((dst / name).read_text() == name for name in side)
    assert (dst / "additional_chat_templates/tool_use.jinja").is_file()
