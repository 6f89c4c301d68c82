"""Scales beside a model: written whole, read strictly, and those that a checkpoint carries."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax import models
from kvjax.cache import LayerScales, Scales
from kvjax.models.cache_scales import load_scales, save_scales
from kvjax.models.checkpoint import SCALES_FILE, copy_side_files

GOLDEN = Path(__file__).parents[1] / "golden" / "llama_bias"
K, V, Q = np.float32([0.1, 1e-30]), np.float32([3e38, 1 / 3]), np.float32([1.5, 2.5, 1e-7, 4])
HEAD = Scales("fp8_e4m3_head", (LayerScales(K, V, Q), None), "text.txt", 1000, 99.9)
TENSOR = Scales("fp8_e5m2", (LayerScales(K[0, ...], V[1, ...]),), "random tokens", 1)


@pytest.fixture
def directory(tmp_path) -> Path:
    """A model directory that may be written to."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "model"))


def assert_same(found: Scales, want: Scales):
    for name in ("codec", "source", "tokens", "percentile"):
        assert getattr(found, name) == getattr(want, name)
    for layer, other in zip(found.layers, want.layers, strict=True):
        assert (layer is None) == (other is None)
        for name in ("k_scale", "v_scale", "q_scale") if layer is not None else ():
            scale, same = getattr(layer, name), getattr(other, name)
            assert (scale is None) == (same is None)
            if scale is not None:
                assert (scale.dtype, scale.shape) == (np.float32, same.shape)
                np.testing.assert_array_equal(scale, same)


@pytest.mark.parametrize("scales", [HEAD, TENSOR], ids=lambda scales: scales.codec)
def test_what_is_written_is_read_bit_for_bit(directory, scales):
    path = save_scales(scales, directory)
    assert path == directory / SCALES_FILE
    assert_same(load_scales(directory), scales)


@pytest.mark.parametrize("step", ["write_text", "replace"])
def test_a_write_that_fails_leaves_what_was_there(directory, monkeypatch, step):
    save_scales(HEAD, directory)
    before = sorted(directory.iterdir())

    def fail(path, *_, **__):
        path.touch()
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(Path, step, fail)
        with pytest.raises(OSError, match="no space"):
            save_scales(TENSOR, directory)
    assert sorted(directory.iterdir()) == before
    assert_same(load_scales(directory), HEAD)


def test_it_is_never_seen_half_written(directory, monkeypatch):
    """What is there under its name while the new file is being written is the old one."""
    save_scales(HEAD, directory)
    write_text = Path.write_text

    def half(path, text, **options):
        write_text(path, text[:20], **options)
        assert_same(load_scales(directory), HEAD)
        return write_text(path, text, **options)

    monkeypatch.setattr(Path, "write_text", half)
    save_scales(TENSOR, directory)
    assert_same(load_scales(directory), TENSOR)


def set_at(*path, value):
    """A change of one field of the file."""

    def change(content):
        *first, last = path
        for key in first:
            content = content[key]
        content[last] = value

    return change


def without(*path):
    def change(content):
        *first, last = path
        for key in first:
            content = content[key]
        del content[last]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_at("format", value=2), "format: got 2; accepted: 1"),
        (set_at("codec", value="int8"), "codec: got 'int8'; accepted: fp8_e4m3, fp8_e5m2, fp8_e4"),
        (without("codec"), "file: got no codec; accepted: format, codec"),
        (set_at("extra", value=1), "file: got extra; accepted: format, codec"),
        (set_at("source", value=None), "source: got None; accepted: text"),
        (set_at("tokens", value=0), "tokens: got 0; accepted: a whole number, at least 1"),
        (set_at("tokens", value=True), "tokens: got True; accepted: a whole number"),
        (set_at("percentile", value=101), "percentile: got 101; accepted: 0 to 100, or null"),
        (set_at("layers", value=[]), r"layers: got \[\]; accepted: a list, one entry a layer"),
        (set_at("layers", 0, value=3), r"layers\[0\]: got 3; accepted: an object with k_scale"),
        (without("layers", 0, "v_scale"), r"layers\[0\]: got no v_scale; accepted: k_scale"),
        (set_at("layers", 0, "w_scale", value=1), r"layers\[0\]: got w_scale; accepted"),
        (set_at("layers", 0, "k_scale", value=0.5), r"layers\[0\].k_scale: got 0.5; accepted: a l"),
        (set_at("layers", 0, "k_scale", 1, value="1"), r"layers\[0\].k_scale: got \[.*; accepted"),
        (set_at("layers", 0, "k_scale", 1, value=-1), r"layers\[0\].k_scale: got -1.0; accepted"),
        (set_at("layers", 0, "v_scale", 0, value=1e99), r"layers\[0\].v_scale: got inf; accepted"),
        (set_at("layers", 0, "v_scale", 0, value=1e-99), r"layers\[0\].v_scale: got 0.0; accepted"),
        (set_at("layers", 0, "q_scale", 0, value=None), r"layers\[0\].q_scale: got \[None"),
        (set_at("layers", 0, "q_scale", value=[]), r"layers\[0\].q_scale: got float32\[0\]; acc"),
    ],
)
def test_a_bad_file_gets_one_error_that_names_the_field(directory, change, message):
    path = save_scales(HEAD, directory)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"kv_cache_scales\.json: {message}"):
        load_scales(directory)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\udcff", '{"format": 1}'])
def test_what_is_no_such_file_is_refused(directory, text):
    (directory / SCALES_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"kv_cache_scales\.json: "):
        load_scales(directory)


def test_they_do_not_go_along_with_other_weights(directory, tmp_path):
    save_scales(HEAD, directory)
    (tmp_path / "converted").mkdir()
    copy_side_files(directory, tmp_path / "converted")
    assert not (tmp_path / "converted" / SCALES_FILE).exists()


def carrying(directory, tensors):
    path = directory / "model.safetensors"
    save_file(load_file(path) | tensors, path)


def stored(i, name):
    return f"model.layers.{i}.self_attn.{name}"


@pytest.mark.parametrize(
    ("codec", "k", "v", "shape"),
    [
        ("fp8_e4m3", [0.25], [0.5], ()),
        ("fp8_e4m3", 0.25, 0.5, ()),
        ("fp8_e4m3_head", [0.25, 1], [0.5, 2], (2,)),
        ("fp8_e4m3_head", [[[0.25]], [[1]]], [[[0.5]], [[2]]], (2,)),
    ],
)
def test_those_that_a_checkpoint_carries(directory, codec, k, v, shape):
    """One number, or one a KV head; the model is the same, and a file beside it comes first."""
    assert load_scales(directory) is None
    tensors = {stored(1, "k_scale"): k, stored(1, "v_scale"): v, stored(1, "q_scale"): [1]}
    carrying(directory, {name: np.asarray(x, np.float32) for name, x in tensors.items()})
    scales = load_scales(directory)
    assert (scales.codec, scales.source, scales.tokens) == (codec, "the checkpoint", 0)
    assert scales.layers[0] is None
    assert scales.layers[1].k_scale.shape == shape
    np.testing.assert_array_equal(scales.layers[1].k_scale.flat, np.float32(k).flat)
    np.testing.assert_array_equal(scales.layers[1].v_scale.flat, np.float32(v).flat)
    model = models.load(directory)
    cache = model.init_cache(1, 4, codec=["bf16", codec], scales=scales)
    np.testing.assert_array_equal(cache.layers[1].scales["k_scale"], scales.layers[1].k_scale)
    save_scales(HEAD, directory)
    assert_same(load_scales(directory), HEAD)


def test_a_checkpoint_with_half_of_them_is_refused(directory):
    carrying(directory, {stored(0, "k_scale"): np.ones(1, np.float32)})
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.v_scale"):
        load_scales(directory)
