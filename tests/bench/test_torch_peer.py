import re

import pytest

from kvjax.bench import torch_peer
from kvjax.bench.case import Case, Inputs
from kvjax.bench.peers import AbsentError
from kvjax.bench.torch_peer import TorchWorker

CASE = Case(2, 4, 2, 8, length=6, capacity=6, codec="f32")


@pytest.fixture
def start():
    workers = []

    def make(python):
        workers.append(TorchWorker(python))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def test_one_worker_serves_all_cases(start, fake_torch):
    worker = start(fake_torch)
    first = worker.contender(CASE, Inputs(CASE, seed=1))
    process = worker._process
    other = Case(1, 4, 4, 8, length=3, capacity=5, codec="bf16")
    second = worker.contender(other, Inputs(other, seed=2))
    assert worker._process is process
    assert worker.version == "0.fake"
    assert first.output.shape == (2, 4, 8)
    assert second.output.shape == (1, 4, 8)
    assert all(contender.sample(3) > 0 for contender in (second, first, second))


def test_the_worker_gets_our_number_of_threads(start, script, monkeypatch):
    monkeypatch.setattr(torch_peer.machine, "threads", lambda: 37)
    said = 'echo "{\\"error\\": \\"threads $3\\"}"'
    with pytest.raises(AbsentError, match="threads 37"):
        start(script("echo", f"#!/bin/sh\n{said}\n")).contender(CASE, Inputs(CASE))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ('#!/bin/sh\necho "{\\"error\\": \\"No module named torch\\"}"\n', "No module named torch"),
        ("#!/bin/sh\necho no JSON\n", "it answered b'no JSON"),
        ("#!/bin/sh\nexit 3\n", "it ended with status 3"),
    ],
)
def test_interpreters_without_torch_are_absent(start, script, program, reason):
    python = script("python", program)
    with pytest.raises(AbsentError, match=f"not installed for {re.escape(python)}: {reason}"):
        start(python).contender(CASE, Inputs(CASE))


def test_no_such_interpreter(start):
    with pytest.raises(AbsentError, match="cannot run /no/such/python: No such file"):
        start("/no/such/python").contender(CASE, Inputs(CASE))


def test_not_compared_on_accelerators(start, fake_torch, monkeypatch):
    monkeypatch.setattr(torch_peer.jax, "default_backend", lambda: "gpu")
    with pytest.raises(AbsentError, match="on CPUs alone"):
        start(fake_torch).contender(CASE, Inputs(CASE))


def test_a_failing_case_is_absent_and_the_worker_goes_on(start, fake_torch):
    worker = start(fake_torch)
    misfit = Inputs(CASE)
    misfit.q = misfit.q[:, :3]  # 3 query heads over 2 KV heads
    with pytest.raises(AbsentError, match=r"torch 0\.fake failed: ValueError"):
        worker.contender(CASE, misfit)
    assert worker.contender(CASE, Inputs(CASE)).sample(1) > 0


def test_a_worker_that_dies_between_samples(start, fake_torch):
    worker = start(fake_torch)
    contender = worker.contender(CASE, Inputs(CASE))
    worker._process.kill()
    with pytest.raises(RuntimeError, match="ended with status -9"):
        contender.sample(1)
