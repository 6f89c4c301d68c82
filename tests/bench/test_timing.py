import itertools

import jax
import jax.numpy as jnp
import pytest

from kvjax.bench import timing
from kvjax.bench.timing import Timing, interleave, time_calls


def test_time_calls_reads_the_clock_around_all_calls():
    clock = itertools.count(100, 7)
    calls = []
    seconds = time_calls(lambda: calls.append(1) or jnp.zeros(()), 5, lambda: next(clock))
    assert seconds == 7
    assert len(calls) == 5


@pytest.mark.parametrize(("backend", "waits"), [("cpu", 4 + 1), ("gpu", 1)])
def test_queued_calls_are_waited_for_once_and_calls_on_a_cpu_each(monkeypatch, backend, waits):
    waited = []
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    time_calls(lambda: "out", 4)
    assert waited == ["out"] * waits


def recorder(log, name, seconds_a_call):
    def sample(calls):
        log.append((name, calls))
        return calls * seconds_a_call

    return sample


def test_every_round_samples_every_contender_once_in_changing_order():
    log, done = [], []
    samplers = {name: recorder(log, name, 1.0) for name in "abcde"}
    interleave(samplers, 6, seed=3, pause=0, on_round=done.append)
    warm_up, sampled = log[:20], [name for name, _ in log[20:]]
    rounds = [tuple(sampled[i : i + 5]) for i in range(0, 30, 5)]
    assert warm_up == [(name, 1) for name in "abcde" for _ in range(4)]
    assert len(sampled) == 30
    assert all(sorted(order) == list("abcde") for order in rounds)
    assert len(set(rounds)) > 1
    assert done == [1] * 6
    before = list(log)
    log.clear()
    interleave(samplers, 6, seed=3, pause=0)
    assert log == before


def test_calls_fill_a_sample():
    log = []
    seconds = {"slow": 0.5, "quick": timing.SAMPLE_SECONDS / 4, "instant": 1e-9}
    timings = interleave({n: recorder(log, n, s) for n, s in seconds.items()}, 3, pause=0)
    assert {name: t.calls for name, t in timings.items()} == {
        "slow": 1,
        "quick": 4,
        "instant": timing.MOST_CALLS,
    }
    # Samples are seconds a call, however many calls they took.
    assert {name: t.median for name, t in timings.items()} == pytest.approx(seconds)


def test_rests_before_every_sample(monkeypatch):
    rests = []
    monkeypatch.setattr(timing.time, "sleep", rests.append)
    interleave({"a": recorder([], "a", 1.0), "b": recorder([], "b", 1.0)}, 3, pause=0.25)
    assert rests == [0.25] * 6


def test_median_and_quartiles():
    spread = Timing(1, (5.0, 1.0, 2.0, 100.0, 3.0))
    assert spread.median == 3
    assert spread.quartiles == (2, 5)


def test_too_few_rounds_for_a_spread():
    with pytest.raises(ValueError, match="rounds=2: at least 3"):
        interleave({}, 2)
