import pytest

from kvjax.train import UptrainConfig


@pytest.mark.parametrize(
    ("alpha", "pretrain_tokens", "steps"),
    [
        (0.05, 6400, 5),  # 320 tokens at 64 a step
        (0.05, 6401, 6),  # part of a step is a step
        (0.07, 100 * 64, 7),  # 0.07 * 100 is 7.000000000000001 in floats
        (0, 10**12, 0),
        (0.05, 2 * 10**12, 1_562_500_000),
    ],
)
def test_alpha_sets_the_steps(alpha, pretrain_tokens, steps):
    config = UptrainConfig(alpha=alpha, pretrain_tokens=pretrain_tokens, seq_len=16, batch=4)
    assert config.total_steps == steps


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "steps=None, alpha=None: exactly one"),
        ({"steps": 3, "alpha": 0.1, "pretrain_tokens": 9}, "steps=3, alpha=0.1: exactly one"),
        ({"alpha": 0.1}, "pretrain_tokens=None"),
        ({"steps": 3, "pretrain_tokens": 9}, "alpha=None, pretrain_tokens=9"),
        ({"steps": -1}, "steps=-1: accepted is an integer from 0 up"),
        ({"steps": 3, "batch": 0}, "batch=0: accepted is an integer from 1 up"),
        ({"steps": 3, "batch": 6, "accumulate": 4}, "accumulate=4 must divide batch=6"),
        ({"steps": 3, "clip": float("nan")}, "clip=nan: accepted is a number above 0"),
        ({"steps": 3, "beta2": 1.0}, "beta2=1.0"),
        ({"steps": 3, "distill_weight": 1.5}, "distill_weight=1.5"),
        ({"steps": 3, "schedule": "linear"}, "schedule='linear': accepted is constant or cosine"),
        ({"steps": 3, "compute_dtype": "f16"}, "compute_dtype='f16': accepted is f32 or bf16"),
    ],
)
def test_settings_that_make_no_run_are_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        UptrainConfig(**given)
