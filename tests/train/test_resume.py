"""Faults 52 and 53: a run that is stopped and resumed must equal one that was not, bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from quick import rest_slow

from kvjax.train import UptrainConfig, train
from kvjax.train.checkpoint import Checkpoints

# 26 sequences in batches of 4: an epoch ends in the middle of step 7.
SETTINGS = {"steps": 10, "seq_len": 16, "batch": 4, "accumulate": 2, "warmup_steps": 4}


class StopError(Exception):
    pass


def run(model, stream, directory, *, stop_before=None, save_every=1, **changes):
    """Metrics of the steps that were taken, without times, and the trained model or None."""
    steps = []

    def on_step(metrics):
        if metrics["step"] == stop_before:
            raise StopError
        steps.append({k: v for k, v in metrics.items() if k != "tokens_per_second"})

    options = {key: changes.pop(key) for key in ("resume", "reset_optimizer") if key in changes}
    config = UptrainConfig(**SETTINGS | changes)
    try:
        trained = train(
            model,
            stream,
            config,
            checkpoint_dir=directory,
            save_every=save_every,
            on_step=on_step,
            **options,
        )
    except StopError:
        trained = None
    return steps, trained


@pytest.fixture(scope="module")
def straight(tiny, stream, tmp_path_factory):
    """Ten steps without a stop: (metrics, model, optimizer state)."""
    directory = tmp_path_factory.mktemp("straight")
    steps, trained = run(tiny, stream, directory)
    return steps, trained, saved_arrays(directory / "10" / "opt_state")


def saved_arrays(directory):
    """The arrays of a checkpoint's item, read by orbax alone."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(directory)


def assert_same(got, wanted):
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# In the warm-up, in the middle of an epoch, and in the next epoch.
@pytest.mark.parametrize("done", rest_slow([2, 5, 8], [2, 8]))
def test_resumed_run_is_the_straight_one(tiny, stream, straight, tmp_path, done):
    first, _ = run(tiny, stream, tmp_path, stop_before=done + 1)
    rest, trained = run(tiny, stream, tmp_path, resume=True)
    assert [m["step"] for m in rest] == list(range(done + 1, 11))
    assert first + rest == straight[0]  # losses, learning rates, norms, tokens
    assert_same(trained, straight[1])
    moments = saved_arrays(tmp_path / "10" / "opt_state")
    assert_same(moments, straight[2])
    (count,) = (leaf for path, leaf in moments.items() if path.endswith("count"))
    assert count == 10


def test_learning_rates_go_on(straight):
    """The list that fault 52 is about: four steps up, then the cosine."""
    rates = [m["lr"] for m in straight[0]]
    cosine = [0.1 + 0.45 * (1 + np.cos(np.pi * s / 6)) for s in range(1, 7)]
    np.testing.assert_allclose(rates, 3e-4 * np.array([0.25, 0.5, 0.75, 1, *cosine]), rtol=1e-5)


def test_missing_moments_are_an_error_unless_asked_for(tiny, stream, straight, tmp_path):
    run(tiny, stream, tmp_path, stop_before=6)
    shutil.rmtree(tmp_path / "5" / "opt_state")
    with pytest.raises(ValueError, match=r"5 has no opt_state.*reset_optimizer"):
        run(tiny, stream, tmp_path, resume=True)
    rest, _ = run(tiny, stream, tmp_path, resume=True, reset_optimizer=True)
    # The schedule and the data go on; only the moments start again.
    assert [(m["step"], m["lr"]) for m in rest] == [(m["step"], m["lr"]) for m in straight[0][5:]]
    assert rest[0]["loss"] == straight[0][5]["loss"]
    assert rest[1]["loss"] != straight[0][6]["loss"]
    (count,) = (
        leaf
        for path, leaf in saved_arrays(tmp_path / "10" / "opt_state").items()
        if path.endswith("count")
    )
    assert count == 5


# Kills itself at the first file operation on the way of step 3's checkpoint that PLACE names.
CHILD = """
import json, os, signal, sys
import numpy as np
from kvjax.models import init
from kvjax.train import UptrainConfig, train

directory, operation, place, config, settings, stream = map(json.loads, sys.argv[1:])

def watch(event, arguments):
    if event == operation and place in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
train(init(config, 0), np.array(stream), UptrainConfig(**settings),
      checkpoint_dir=directory, save_every=1)
"""


@pytest.mark.parametrize(
    ("operation", "place", "left", "resumes_after"),
    [
        # One of the items of checkpoint 3 is there, the others are half-written.
        ("os.rename", "/3.orbax-checkpoint-tmp/", {"2", "3.orbax-checkpoint-tmp"}, 2),
        # Checkpoint 3 is complete, and checkpoint 2 half-deleted.
        pytest.param("os.rmdir", "/2", {"2", "3"}, 3, marks=pytest.mark.slow),
    ],
)
def test_killed_while_saving(
    tiny, tiny_config, stream, straight, tmp_path, operation, place, left, resumes_after
):
    arguments = (str(tmp_path), operation, place, tiny_config, SETTINGS, stream.tolist())
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *map(json.dumps, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert {path.name for path in tmp_path.iterdir()} == left
    rest, trained = run(tiny, stream, tmp_path, resume=True, save_every=20)
    assert rest == straight[0][resumes_after:]
    assert_same(trained, straight[1])
    assert [path.name for path in tmp_path.iterdir()] == ["10"]


def test_resume_without_a_checkpoint_starts(tiny, stream, straight, tmp_path):
    steps, _ = run(tiny, stream, tmp_path, resume=True, stop_before=3)
    assert steps == straight[0][:2]


def test_a_run_is_not_started_over_another(tiny, stream, tmp_path):
    run(tiny, stream, tmp_path, stop_before=3)
    with pytest.raises(FileExistsError, match="2 exists: resume that run, or name another"):
        run(tiny, stream, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 1e-3}, r"learning_rate is 0\.0003 there and 0\.001 here"),
        ({"steps": 11}, "steps is 10 there and 11 here"),
        ({"seed": 7, "batch": 8}, "batch is 4 there and 8 here; seed is 0 there and 7 here"),
    ],
)
def test_another_run_is_not_resumed(tiny, stream, tmp_path, changes, message):
    run(tiny, stream, tmp_path, stop_before=2)
    with pytest.raises(ValueError, match=message):
        run(tiny, stream, tmp_path, resume=True, **changes)


def test_other_data_is_not_resumed(tiny, stream, tmp_path):
    run(tiny, stream, tmp_path, stop_before=2)
    with pytest.raises(ValueError, match="tokens of data is 421 there and 400 here"):
        run(tiny, stream[:400], tmp_path, resume=True)


def test_at_a_constant_rate_a_run_can_be_prolonged_but_not_cut(tiny, stream, tmp_path):
    straight, _ = run(tiny, stream, tmp_path / "straight", schedule="constant", steps=4)
    run(tiny, stream, tmp_path / "two", schedule="constant", steps=2)
    rest, _ = run(tiny, stream, tmp_path / "two", schedule="constant", steps=4, resume=True)
    assert rest == straight[2:]
    with pytest.raises(ValueError, match="it is past steps=3"):
        run(tiny, stream, tmp_path / "two", schedule="constant", steps=3, resume=True)


def test_checkpoints_come_as_often_as_asked_and_at_the_end(tiny, stream, tmp_path):
    seen = []

    def on_step(metrics):
        with Checkpoints(tmp_path) as checkpoints:
            seen.append(checkpoints.step)

    train(
        tiny,
        stream,
        UptrainConfig(**SETTINGS),
        checkpoint_dir=tmp_path,
        save_every=4,
        on_step=on_step,
    )
    assert seen == [None] * 4 + [4] * 4 + [8] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["10"]
