"""The public calculators that compare_calculators.py runs, and how each is asked.

    python scripts/calculator_peers.py NAME DIRECTORY TOKENS

runs in the environment of the peer NAME, reads DIRECTORY/config.json and prints one line of JSON:
{"bytes": ...}, with a "note" where one should know more of the figure, or {"refused": ...}.
Batch 1, two bytes an element. Imports nothing but the standard library and the peer.
"""

import importlib
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

COOKBOOK_COMMIT = "827ee3b293a63f14403f1467d08c91fda213f4e6"
COOKBOOK_FILE = "calc/calc_transformer_mem.py"
TRANSFORMERS = "transformers==4.57.6"


class RefusalError(Exception):
    """A peer's own word that it gives no figure, where it does not raise."""


class Noted(NamedTuple):
    """A figure with something to know about it."""

    figure: float
    note: str


def hf_mem(directory: Path, tokens: int) -> float:
    """Its whole `run`, with the Hub's answers made here: the config and one tensor of weights."""
    httpx2, peer = importlib.import_module("httpx2"), importlib.import_module("hf_mem")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    files = {
        "config.json": (directory / "config.json").read_bytes(),
        "model.safetensors": len(header).to_bytes(8, "little") + header,
    }
    listing = json.dumps([{"type": "file", "path": name} for name in files]).encode()

    async def answer(_transport: Any, request: Any) -> Any:
        name = request.url.path.rsplit("/", 1)[-1]
        return httpx2.Response(200, content=files.get(name, listing), request=request)

    httpx2.AsyncHTTPTransport.handle_async_request = answer
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = peer.run(
            "published/config", experimental=True, max_model_len=tokens, kv_cache_dtype="bfloat16"
        )
    if result.kv_cache is None:
        raise RefusalError(said[-1].message)
    return result.kv_cache


def llm_analysis(directory: Path, tokens: int) -> float:
    """One layer's cache times the layers, as its `inference` counts it."""
    config = importlib.import_module("llm_analysis.config")
    model = config.get_model_config_from_hf(str(directory))
    analysis = importlib.import_module("llm_analysis.analysis").LLMAnalysis(
        model, config.get_gpu_config_by_name("a100-sxm-80gb")
    )
    layer = analysis.get_memory_kv_cache_per_layer(1, tokens, kv_cache_dtype_bytes=2)
    return layer * model.num_layers


def aiconfigurator(directory: Path, tokens: int) -> float | Noted:
    """Its model of the family; where it has none, what its fallback fits into just enough bytes."""
    builders = importlib.import_module("aiconfigurator_core.sdk.config_builders")
    models = importlib.import_module("aiconfigurator_core.sdk.models")
    one_gpu = builders.build_model_config(1, 1, 1, 1, 1, kvcache_quant_mode="bfloat16")
    try:
        model = models.get_model(str(directory), one_gpu, "trtllm")
    except ValueError as error:
        if "not supported" not in str(error).lower():
            raise
    else:
        return model.get_kvcache_bytes_per_sequence(tokens)
    memory = importlib.import_module("aiconfigurator_core.sdk.memory")
    fallback = memory.NaiveKVCacheEstimator.from_model_path(
        str(directory), tp_size=1, pp_size=1, allow_hf_config_download=False
    )
    fallback.estimate(capacity=2**60, naive_kv_reservation=1)  # raises where it gives no figure
    short, enough = 0, tokens * fallback.kv_bytes_per_token()
    while enough - short > 1:
        middle = (short + enough) // 2
        if fallback.get_kvcache_max_tokens(middle) >= tokens:
            enough = middle
        else:
            short = middle
    return Noted(enough, "its fallback, off by default, for families it has no model of")


def llm_cal(directory: Path, tokens: int) -> float:
    """The detector and formula that its report is made of."""
    detector = importlib.import_module("llm_cal.architecture.detector")
    formula = importlib.import_module("llm_cal.architecture.formulas.kv_cache")
    profile = detector.detect(json.loads((directory / "config.json").read_text()))
    figure = formula.compute_kv_cache_bytes(profile, tokens, dtype_bytes=2)
    if figure.value <= 0:
        raise RefusalError(figure.source)
    return figure.value


def cookbook(directory: Path, tokens: int) -> float:
    """The printed figure, which has two decimals of a GiB; its length is prompt plus output."""
    script = directory.parent / Path(COOKBOOK_FILE).name
    arguments = [
        f"--hf_model_name_or_path={directory}",
        "--infer",
        f"--sequence-length={tokens - 1}",
        "--output-tokens=1",
    ]
    run = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    printed = re.search(r"Total KV Cache Memory: ([\d.]+) GiB", run.stdout)
    if printed is None:
        raise RefusalError(run.stderr.strip().splitlines()[-1])
    return float(printed[1]) * 2**30


@dataclass(frozen=True)
class Peer:
    """A calculator: what to install, and the function above that asks it."""

    name: str
    version: str
    packages: tuple[str, ...]
    ask: Callable[[Path, int], float | Noted]
    alone: tuple[str, ...] = ()  # installed without dependencies: it pins some too old to serve


PEERS = (
    Peer("hf-mem", "0.5.6", ("hf-mem==0.5.6",), hf_mem),
    Peer("aiconfigurator", "0.12.0", ("aiconfigurator-core==0.12.0",), aiconfigurator),
    Peer("llm-cal", "0.2.0", ("llm-cal==0.2.0",), llm_cal),
    Peer(
        "llm-analysis",
        "0.2.2",
        (TRANSFORMERS, "fire==0.7.1"),
        llm_analysis,
        alone=("llm-analysis==0.2.2",),
    ),
    Peer("cookbook", COOKBOOK_COMMIT, (TRANSFORMERS,), cookbook),
)


def outcome(figure: Callable[[], float | Noted]) -> dict[str, Any]:
    """{"bytes": ...}, or {"refused": ...} with the message of what was raised, one short line."""
    try:
        answer = figure()
        if isinstance(answer, Noted):
            return {"bytes": round(answer.figure), "note": answer.note}
        return {"bytes": round(answer)}
    except ImportError:  # an environment that lacks something, no word of the peer's
        raise
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        return {"refused": message if len(message) <= 160 else message[:157] + "..."}


if __name__ == "__main__":
    named = next(peer for peer in PEERS if peer.name == sys.argv[1])
    print(json.dumps(outcome(lambda: named.ask(Path(sys.argv[2]), int(sys.argv[3])))))
