import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from kvjax.models import load, save
from kvjax.train import UptrainConfig, held_out_loss, uptrain
from kvjax.train.step import cast

CONFIG = UptrainConfig(
    steps=30, seq_len=16, batch=8, learning_rate=2e-2, warmup_steps=4, weight_decay=0.0
)


@pytest.fixture
def place(tiny, stream, tmp_path):
    """A directory with a model `src` in bf16, and token ids to train on and to evaluate on."""
    save(cast(tiny, "bf16"), tmp_path / "src")
    (tmp_path / "src" / "tokenizer_config.json").write_text("{}")
    np.save(tmp_path / "data.npy", stream[:321])
    np.save(tmp_path / "held_out.npy", stream[321:])
    return tmp_path


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_directory_to_directory(place, stream):
    seen = []
    report = uptrain(
        place / "src",
        place / "dst",
        place / "data.npy",
        CONFIG,
        held_out_path=place / "held_out.npy",
        on_step=seen.append,
    )
    # The loss falls, on what was trained on and on what was not.
    assert seen[0]["loss"] > 4
    assert seen[-1]["loss"] < 2.5
    assert report.held_out_after < 3 < report.held_out_before
    trained = load(place / "dst")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(trained)} == {"bfloat16"}
    assert report.held_out_after == held_out_loss(
        cast(trained, "f32"), stream[321:], seq_len=16, batch=8
    )
    assert names(place / "dst") == ["config.json", "model.safetensors", "tokenizer_config.json"]
    assert names(place) == ["data.npy", "dst", "dst.train", "held_out.npy", "src"]
    assert report.steps == 30
    assert report.tokens == 30 * 8 * 16
    lines = (place / "dst.train" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == seen
    assert [metrics["step"] for metrics in seen] == list(range(1, 31))
    assert seen[4]["tokens"] == 5 * 8 * 16
    assert seen[0].keys() == {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second"}


def test_metrics_of_a_resumed_run_have_no_step_twice(place):
    class StopError(Exception):
        pass

    def stop(metrics):
        if metrics["step"] == 5:
            raise StopError

    arguments = (place / "src", place / "dst", place / "data.npy", replace(CONFIG, steps=6))
    with pytest.raises(StopError):
        uptrain(*arguments, save_every=3, on_step=stop)
    assert not (place / "dst").exists()
    file = place / "dst.train" / "metrics.jsonl"
    straight = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(straight) == 5
    with file.open("a") as lines:
        lines.write('{"step": 6, "lo')  # the process was killed here
    uptrain(*arguments, save_every=3, resume=True)
    resumed = [json.loads(line) for line in file.read_text().splitlines()]
    assert [metrics["step"] for metrics in resumed] == [1, 2, 3, 4, 5, 6]
    assert resumed[:3] == straight[:3]
    assert resumed[4]["loss"] == straight[4]["loss"]


def test_no_steps_copy_the_model(place):
    config = UptrainConfig(alpha=0, pretrain_tokens=10**9, seq_len=16)
    report = uptrain(place / "src", place / "dst", place / "data.npy", config)
    assert report.steps == 0
    src, dst = ((place / name / "model.safetensors").read_bytes() for name in ("src", "dst"))
    assert src == dst


def test_a_teacher_is_learned_from(place, tiny, stream):
    """From the loss of distillation alone, a spoilt student comes back towards its teacher."""
    spoilt = jax.tree.map(
        lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), tiny
    )
    save(spoilt, place / "spoilt")
    seen = []
    uptrain(
        place / "spoilt",
        place / "dst",
        place / "data.npy",
        replace(CONFIG, distill_weight=1.0, steps=15),
        teacher_dir=place / "src",
        on_step=seen.append,
    )
    assert seen[-1]["loss"] < 0.3 * seen[0]["loss"]
    assert seen[0]["cross_entropy"] > seen[0]["loss"]


def refuse_full(place):
    (place / "dst").mkdir()
    (place / "dst" / "mine").touch()
    return {}


@pytest.mark.parametrize(
    ("prepare", "error", "message"),
    [
        (refuse_full, FileExistsError, "dst exists already"),
        (lambda place: {"data_path": place / "none.npy"}, FileNotFoundError, r"none\.npy"),
        (lambda place: {"src_dir": place / "none"}, FileNotFoundError, "none"),
        (
            lambda place: {"config": replace(CONFIG, seq_len=321)},
            ValueError,
            r"data\.npy is too short: 321 tokens, at least 322 are needed",
        ),
        (lambda place: {"save_every": 0}, ValueError, "save_every=0"),
        (
            lambda place: {"config": replace(CONFIG, learning_rate=1e30)},
            ValueError,
            r"the loss is (nan|inf) in step \d+; try a lower learning_rate than 1e\+30",
        ),
    ],
)
def test_errors_leave_no_model(place, prepare, error, message):
    arguments = {
        "src_dir": place / "src",
        "dst_dir": place / "dst",
        "data_path": place / "data.npy",
        "config": CONFIG,
    }
    arguments |= prepare(place)
    before = names(place)
    with pytest.raises(error, match=message):
        uptrain(**arguments)
    assert set(names(place)) - {"dst.train"} == set(before)


def test_a_result_that_cannot_be_written_leaves_nothing(place):
    broken = place / "src" / "additional_chat_templates" / "broken"
    broken.parent.mkdir()
    broken.symlink_to("nowhere")  # cannot be copied
    arguments = (place / "src", place / "dst", place / "data.npy", replace(CONFIG, steps=6))
    before = names(place)
    with pytest.raises(OSError, match="broken"):
        uptrain(*arguments)
    assert names(place) == sorted([*before, "dst.train"])
    # The last checkpoint is all that a second try needs.
    broken.unlink()
    seen = []
    uptrain(*arguments, resume=True, on_step=seen.append)
    assert seen == []
    assert (place / "dst" / "tokenizer_config.json").exists()


def test_another_vocabulary_cannot_teach(place, golden):
    with pytest.raises(ValueError, match="teacher's vocabulary has 96 tokens, the model's 61"):
        uptrain(
            place / "src",
            place / "dst",
            place / "data.npy",
            CONFIG,
            teacher_dir=golden / "llama_bias",
        )


def test_sequences_past_the_learned_positions_are_refused(place, golden, stream):
    message = "49 tokens exceed the model's 48 learned positions"
    gpt2, config = golden / "gpt2_conv1d", replace(CONFIG, seq_len=49)
    with pytest.raises(ValueError, match=message):
        uptrain(gpt2, place / "dst", place / "data.npy", config)
    with pytest.raises(ValueError, match=message):
        held_out_loss(load(gpt2), stream, seq_len=49)
