"""torch's SDPA as a contender: a worker under another interpreter, sampled in turn with us."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from jax import Array

from kvjax.bench import machine
from kvjax.bench.case import Case, Inputs
from kvjax.bench.peers import AbsentError, Contender

WORKER = Path(__file__).with_name("torch_worker.py")


class TorchWorker:
    """Our end of `torch_worker`; for a `with` block.

    The worker starts when it is first needed and keeps its copies of the inputs until the block
    ends. It has as many threads as XLA, and rests while others are sampled.

    Attributes:
      version: torch's, once the worker has started.
    """

    def __init__(self, python: str | None = None):
        """`python` is an interpreter that has torch; None for the one that runs this."""
        self._python = python or sys.executable
        self._process: subprocess.Popen[bytes] | None = None
        self._stack = ExitStack()
        self.version: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def contender(self, case: Case, inputs: Inputs) -> Contender:
        """The worker, given the arrays of a case; AbsentError where it cannot run."""
        if self._process is None:
            self._process = self._start()
        name = repr(case)
        request = {
            "add": name,
            "dtype": inputs.q.dtype.name,
            "q": inputs.q.shape,
            "k": inputs.k.shape,
            "length": case.length,
        }
        try:
            output = self._ask(self._process, request, inputs.q, inputs.k, inputs.v)["output"]
        except RuntimeError as error:
            raise AbsentError(f"torch {self.version} failed: {error}") from None

        def sample(calls: int) -> float:
            assert self._process is not None
            return self._ask(self._process, {"run": name, "calls": calls})["seconds"]

        return Contender(sample, np.array(output, np.float32).reshape(inputs.q.shape))

    def _start(self) -> subprocess.Popen[bytes]:
        if jax.default_backend() != "cpu":
            raise AbsentError("compared on CPUs alone")
        # -P: the modules beside the worker must not stand in for others of the same name.
        command = [self._python, "-P", str(WORKER), str(machine.threads())]
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise AbsentError(f"cannot run {self._python}: {error.strerror}") from None
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        try:
            self.version = self._answer(process)["version"]
        except RuntimeError as error:
            raise AbsentError(f"not installed for {self._python}: {error}") from None
        return process

    def _ask(
        self, process: subprocess.Popen[bytes], request: dict[str, Any], *arrays: Array
    ) -> dict[str, Any]:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            for array in arrays:
                process.stdin.write(np.asarray(array).tobytes())
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended; its last answer says why
        return self._answer(process)

    def _answer(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"it ended with status {process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer
