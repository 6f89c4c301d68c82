"""GGUF files of Llama-style models, written here with the gguf package as llama.cpp does."""

from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax import models
from kvjax.models.checkpoint import Checkpoint
from kvjax.models.gguf import NAMES, gguf_to_hf
from kvjax.models.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

GOLDEN = Path(__file__).parents[1] / "golden" / "llama_gqa_tied"
NORMAL, CONTROL = 1, 3  # kinds of tokens


def byte_alphabet():
    """GPT-2's 256 characters for bytes (https://github.com/openai/gpt-2, encoder.py)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in shown] + [chr(256 + n) for n in range(256 - len(shown))]


MERGES = ["t h", "th e", "1 2"]
TOKENS = [*byte_alphabet(), "th", "the", "12", "<|im_end|>"]


def interleave(weight, heads):
    """Rows of one half of a head between those of the other, as llama.cpp's converter does.

    LlamaModel.permute in its convert_hf_to_gguf.py.
    """
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, rows, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write(path, architecture="llama", pre="smollm"):
    checkpoint = Checkpoint(GOLDEN)
    config = checkpoint.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([NORMAL] * (len(TOKENS) - 1) + [CONTROL])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    heads = {"attn_q.": config["num_attention_heads"], "attn_k.": config["num_key_value_heads"]}
    for ours, theirs in NAMES.items():
        for i in range(config["num_hidden_layers"] if "{i}" in ours else 1):
            name = theirs.replace("{i}", str(i))
            if name not in checkpoint:  # tied embeddings have no head
                continue
            values = checkpoint.read(name).astype(np.float32)
            for part, count in heads.items():
                values = interleave(values, count) if part in ours else values
            writer.add_tensor(ours.replace("{i}", str(i)), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gguf")
    return gguf_to_hf(write(directory / "model.gguf"), directory / "hf")


def test_tensors_and_config_come_back(model_dir):
    found, expected = Checkpoint(model_dir), Checkpoint(GOLDEN)
    assert sorted(found.names()) == sorted(expected.names())
    for name in expected.names():
        assert found.dtype(name) == expected.dtype(name)
        assert found.read(name).tobytes() == expected.read(name).tobytes()
    same = found.config.keys() & expected.config.keys()
    assert len(same) >= 14
    assert {k: found.config[k] for k in same} == {k: expected.config[k] for k in same}


def test_logits_are_those_of_transformers(model_dir):
    reference = np.load(GOLDEN / "ref.npz")
    model = models.load(model_dir, dtype="f32")
    logits = jax.jit(lambda model, tokens: model(tokens)[0])(model, reference["input_ids"])
    assert np.abs(logits - reference["logits"]).max() <= 2e-4


def test_tokenizer(model_dir):
    tokenizer = load_tokenizer(model_dir)
    # Digits stay apart even where a merge would join them; control tokens are whole.
    tokens = tokenizer.encode("the 12<|im_end|>", add_special_tokens=False).tokens
    assert tokens == ["the", "Ġ", "1", "2", "<|im_end|>"]
    text = "naïve – 你好\t x=3.14\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "qwen2"}, r"general\.architecture='qwen2'; accepted: 'llama'"),
        ({"pre": "llama-bpe"}, r"tokenizer\.ggml\.pre='llama-bpe'; accepted: 'smollm'"),
    ],
    ids=["architecture", "tokenizer"],
)
def test_another_kind_of_file_is_refused(settings, message, tmp_path):
    path = write(tmp_path / "model.gguf", **settings)
    with pytest.raises(ValueError, match=message):
        gguf_to_hf(path, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_destination_that_holds_something_is_refused(tmp_path):
    path = write(tmp_path / "model.gguf")
    with pytest.raises(FileExistsError, match="empty directory"):
        gguf_to_hf(path, tmp_path)
