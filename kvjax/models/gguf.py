"""A GGUF file of a Llama-style model, written out as a Hugging Face directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from kvjax.models.checkpoint import CheckpointWriter, TensorSpec, split_into_shards

if TYPE_CHECKING:
    from gguf import ReaderTensor
    from tokenizers import Tokenizer

# GGUF's names, in which {i} is the block, and the checkpoint's.
NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "blk.{i}.attn_q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "blk.{i}.attn_k.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "blk.{i}.attn_v.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "blk.{i}.attn_output.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "blk.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.ffn_gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "blk.{i}.ffn_up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "blk.{i}.ffn_down.weight": "model.layers.{i}.mlp.down_proj.weight",
}
CONTROL_TOKEN = 3  # gguf's token_type of special tokens


def gguf_to_hf(gguf_file: str | os.PathLike[str], model_dir: str | os.PathLike[str]) -> Path:
    """Write a llama GGUF as config.json, bf16 safetensors and tokenizer.json.

    Quantised tensors are dequantised by the `gguf` package (extra `smollm2`). Returns model_dir.

    Raises:
      FileExistsError: model_dir exists and is not empty.
      ValueError: the file's architecture or tokenizer is not one that is read here.
      ModuleNotFoundError: `gguf` or `tokenizers` is not installed.
    """
    from gguf import GGUFReader

    reader = GGUFReader(os.fspath(gguf_file))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for field, accepted in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
        if fields.get(field) != accepted:
            raise ValueError(f"{gguf_file}: {field}={fields.get(field)!r}; accepted: {accepted!r}")
    config = _config(fields, tied=all(t.name != "output.weight" for t in reader.tensors))
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    specs = {
        tensor.name: TensorSpec(
            _hf_name(tensor.name),
            np.dtype(ml_dtypes.bfloat16),
            tuple(int(n) for n in reversed(tensor.shape)),
        )
        for tensor in reader.tensors
    }
    with CheckpointWriter(model_dir, split_into_shards(specs.values()), config) as writer:
        for tensor in reader.tensors:
            values = _dequantise(tensor, heads)
            writer.write(specs[tensor.name].name, values.astype(ml_dtypes.bfloat16))
        _tokenizer(fields).save(str(writer.directory / "tokenizer.json"))
    return Path(model_dir)


def _hf_name(name: str) -> str:
    if not name.startswith("blk."):
        return NAMES[name]
    _, block, rest = name.split(".", 2)
    return NAMES[f"blk.{{i}}.{rest}"].replace("{i}", block)


def _dequantise(tensor: ReaderTensor, heads: dict[str, int]) -> np.ndarray:
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    for part, count in heads.items():
        if tensor.name.endswith(f"attn_{part}.weight"):
            # GGUF keeps the two channels of a rotary pair side by side; the checkpoint has all
            # first channels of a head, then all second ones.
            pairs = values.reshape(count, -1, 2, values.shape[-1])
            return pairs.swapaxes(1, 2).reshape(values.shape)
    return values


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # Stored in float32; its shortest spelling is the number that was meant.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "bfloat16",
    }


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE that GGUF's metadata holds, with single digits (pre-tokenizer smollm)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pre = fields["tokenizer.ggml.pre"]
    if pre != "smollm":
        raise ValueError(f"tokenizer.ggml.pre={pre!r}; accepted: 'smollm'")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in special if kind == CONTROL_TOKEN]
    )
    return tokenizer
