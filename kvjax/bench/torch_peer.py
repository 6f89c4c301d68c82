"""torch's SDPA as a contender: a worker under another interpreter, sampled in turn with us."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from kvjax.bench import machine
from kvjax.bench.case import Case, Inputs
from kvjax.bench.peers import AbsentError, Contender

WORKER = Path(__file__).with_name("torch_worker.py")


class TorchWorker:
    """Our end of `torch_worker`; close it after use.

    The worker starts when it is first needed and keeps its copies of the inputs until it is closed.
    It has as many threads as XLA, and rests while others are sampled.

    Attributes:
      version: torch's, once the worker has started.
    """

    def __init__(self, python: str | None = None):
        """`python` is an interpreter that has torch; None for the one that runs this."""
        self._python = python or sys.executable
        self._process: subprocess.Popen[bytes] | None = None
        self.version: str | None = None

    def close(self) -> None:
        """End the worker."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def contender(self, case: Case, inputs: Inputs) -> Contender:
        """The worker, given the arrays of a case; AbsentError where it cannot run."""
        if self._process is None:
            self._start()
        name = repr(case)
        request = {
            "add": name,
            "dtype": inputs.q.dtype.name,
            "q": inputs.q.shape,
            "k": inputs.k.shape,
            "length": case.length,
        }
        try:
            output = self._ask(request, inputs.q, inputs.k, inputs.v)["output"]
        except RuntimeError as error:
            raise AbsentError(f"torch {self.version} failed: {error}") from None

        def sample(calls: int) -> float:
            return self._ask({"run": name, "calls": calls})["seconds"]

        return Contender(sample, np.array(output, np.float32).reshape(inputs.q.shape))

    def _start(self) -> None:
        if jax.default_backend() != "cpu":
            raise AbsentError("compared on CPUs alone")
        # -P: the modules beside the worker must not stand in for others of the same name.
        command = [self._python, "-P", str(WORKER), str(machine.threads())]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.version = self._answer()["version"]
        except OSError as error:
            raise AbsentError(f"cannot run {self._python}: {error.strerror}") from None
        except RuntimeError as error:
            self.close()
            raise AbsentError(f"not installed for {self._python}: {error}") from None

    def _ask(self, request: dict[str, Any], *arrays: Array) -> dict[str, Any]:
        assert self._process is not None
        pipe = self._process.stdin
        assert pipe is not None
        # A worker that has ended says so when its answer is read.
        with suppress(BrokenPipeError):
            pipe.write(json.dumps(request).encode() + b"\n")
            for array in arrays:
                pipe.write(np.asarray(array).tobytes())
            pipe.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"it ended with status {self._process.wait()}")
        try:
            answer = json.loads(line)
        except json.JSONDecodeError:
            raise RuntimeError(f"it answered {line!r}") from None
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer
