"""Times torch's scaled_dot_product_attention; run by an interpreter that has torch.

A program of its own that imports nothing of kvjax: `kvjax.bench.torch_peer` starts it with the
number of threads and then writes requests, one JSON object a line, each of which gets one JSON
line back:

    (at the start)                           {"version": "2.13.0"}
    {"add": id, "dtype": "float32", "q": shape, "k": shape, "length": n}
      and the raw bytes of q (B, N, H), k and v (B, K, S, H)
                                             {"output": flat (B, N, H)}
    {"run": id, "calls": n}                  {"seconds": of all n calls}

What fails is answered with {"error": message}.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Answer requests until standard input ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what torch prints must not get between the answers

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        import torch
    except ImportError as error:
        return answer({"error": str(error)})
    torch.set_num_threads(int(sys.argv[1]))
    answer({"version": torch.__version__})
    steps: dict[str, Callable[[], Any]] = {}
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        try:
            if "add" in request:
                step = steps[request["add"]] = make_step(torch, request)
                answer({"output": step().float().flatten().tolist()})
            else:
                answer({"seconds": time_calls(steps[request["run"]], request["calls"])})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def make_step(torch: Any, request: dict[str, Any]) -> Callable[[], Any]:
    """A call in which q (B, N, 1, H) attends the first `length` slots of k and v, views of them."""
    dtype = getattr(torch, request["dtype"])

    def read(shape: list[int]) -> Any:
        raw = bytearray(sys.stdin.buffer.read(math.prod(shape) * dtype.itemsize))
        return torch.frombuffer(raw, dtype=dtype).reshape(shape).clone()  # aligned as torch likes

    q = read(request["q"])[:, :, None]
    k, v = (read(request["k"])[:, :, : request["length"]] for _ in range(2))
    attention = torch.nn.functional.scaled_dot_product_attention

    def step() -> Any:
        with torch.inference_mode():
            return attention(q, k, v, enable_gqa=True)

    return step


def time_calls(step: Callable[[], Any], calls: int) -> float:
    """Seconds of `calls` calls of `step`."""
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
