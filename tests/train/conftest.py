"""A tiny Llama and a stream of tokens that it can learn."""

from pathlib import Path

import numpy as np
import pytest

from kvjax.models import init

VOCAB = 61


@pytest.fixture(scope="session")
def tiny_config():
    return {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


@pytest.fixture(scope="session")
def tiny(tiny_config):
    return init(tiny_config, seed=0)


@pytest.fixture(scope="session")
def stream():
    """421 tokens, each 1 to 3 above the one before: 26 sequences of 16."""
    steps = np.random.default_rng(0).integers(1, 4, 421)
    return (np.cumsum(steps) % VOCAB).astype(np.int32)


@pytest.fixture(scope="session")
def golden():
    """Models that transformers wrote."""
    return Path(__file__).parents[1] / "golden"
