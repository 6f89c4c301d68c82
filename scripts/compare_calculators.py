"""Compare `kvjax size` with public calculators, each run unmodified at a pinned version.

    python scripts/compare_calculators.py --work /tmp/calculators --cookbook PATH/TO/cookbook

Ten published configs, 32,768 tokens, batch 1, two bytes an element. Peers from the package registry
are installed into virtual environments under --work, which a second run uses again; EleutherAI's
cookbook is no package, so its script is read out of a clone at its pinned commit (`git show`), and
left out without --cookbook. Each peer and model is a process of its own, told to stay offline. A
refusal is a result. Writes experiments/results/calculators.json and the table of
docs/calculators.md, and prints that table. Needs kvjax, git and Python 3.12 or 3.13.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import calculator_peers
from calculator_peers import COOKBOOK_COMMIT, COOKBOOK_FILE, PEERS, Peer, outcome

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "tests" / "sizing" / "published.json"
RESULTS = ROOT / "experiments" / "results" / "calculators.json"
PAGE = ROOT / "docs" / "calculators.md"
BEGIN, END = "<!-- begin table: scripts/compare_calculators.py -->", "<!-- end table -->"
TOKENS = 32_768
MODELS = (
    "Llama-3-8B",
    "Qwen3-30B-A3B",
    "Falcon-7B",
    "Mistral-7B-v0.1",
    "Gemma-3-27B",
    "gpt-oss-120b",
    "Gemma-3n-E4B (text)",
    "DeepSeek-V3 / R1",
    "Jamba-v0.1",
    "Qwen3-Next-80B-A3B",
)
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


def installed(peer: Peer, work: Path) -> Path:
    """The Python of an environment that holds the peer, made where it is not there yet."""
    home = work / peer.name
    python = home / "bin" / "python"
    holds, wanted = home / "holds.txt", " ".join(peer.packages + peer.alone)
    if not holds.exists() or holds.read_text() != wanted:
        print(f"installing {peer.name} {peer.version}", file=sys.stderr)
        venv.create(home, clear=True, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *peer.packages], check=True)
        if peer.alone:
            subprocess.run([*pip, "--no-deps", *peer.alone], check=True)
        holds.write_text(wanted)
    return python


def ask(python: Path, peer: Peer, directory: Path) -> dict[str, Any]:
    """The peer's answer for one config, from a process of its own."""
    command = [str(python), calculator_peers.__file__, peer.name, str(directory), str(TOKENS)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=offline)
    if run.returncode:
        raise RuntimeError(f"{peer.name}, {directory.name}: {run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def ours(config: dict[str, Any], definition: str) -> dict[str, Any]:
    """kvjax's figure; `allocated` alone, like the peers': their figures hold no states."""
    from kvjax import sizing

    def cache() -> sizing.CacheBytes:
        return sizing.load(config).cache_bytes(TOKENS, codec="bf16", definition=definition)

    result = outcome(lambda: cache().allocated)
    if "bytes" in result:
        result["state_bytes"] = cache().state
    return result


def transformers_bytes(measured: dict[str, Any]) -> int:
    """Bytes of the keys and values that transformers held, at TOKENS instead of `measured["T"]`.

    A tensor as long as the text grows with it; a window's, which is shorter, stays as it is.
    """

    def total(tokens: int) -> int:
        held = 0
        for layer, which in measured["layers"].items():
            count = len(which) if isinstance(which, list) else int(which.split()[0])
            for shape, dtype in re.findall(r"(?:keys|values)\[([\d, ]+)\](\w+)", layer):
                batch, heads, rows, width = map(int, shape.split(","))
                rows = tokens if rows == measured["T"] else rows
                held += count * batch * heads * rows * width * ITEMSIZE[dtype]
        return held

    if total(measured["T"]) != measured["kv_bytes"]:
        raise ValueError(f"layers: their shapes hold {total(measured['T'])} bytes, not kv_bytes")
    return total(TOKENS)


def table(results: dict[str, Any]) -> str:
    """The markdown: GiB, and times what transformers holds; refusals as numbered notes."""
    names = [f"{peer['name']} {peer['version'][:7]}" for peer in results["peers"]]
    lines = [
        "| model | transformers | kvjax | kvjax `hf-dynamic` | " + " | ".join(names) + " |",
        "|" + "---|" * (len(names) + 4),
    ]
    notes: list[str] = []
    for model in results["models"]:
        measured = model["transformers"]["bytes"]
        cells = [model["name"], f"{measured / 2**30:.3f}"]
        answers = [("kvjax", model["kvjax"]), ("kvjax", model["kvjax_hf_dynamic"])]
        for who, answer in [*answers, *model["peers"].items()]:
            cell, said = "refuses", answer.get("note")
            if "bytes" in answer:
                cell = f"{answer['bytes'] / 2**30:.3f} (×{answer['bytes'] / measured:.2f})"
            else:
                said = f"`{answer['refused'].replace('`', chr(39))}`"
            if said is not None:
                note = f"{who}: {said}"
                notes += [] if note in notes else [note]
                cell += f" [{notes.index(note) + 1}]"
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{n}. {note}" for n, note in enumerate(notes, 1))])


def compare(records: dict[str, Any], work: Path, peers: list[Peer]) -> dict[str, Any]:
    """Every figure of every model, as it goes into the JSON file."""
    pythons = {peer.name: installed(peer, work) for peer in peers}
    models = []
    for name in MODELS:
        print(name, file=sys.stderr)
        record = records[name]
        directory = work / "configs" / re.sub(r"[^\w.-]+", "-", name).strip("-")
        directory.mkdir(exist_ok=True)
        # A config that names code of its own would send transformers after files not there.
        config = {key: value for key, value in record["config"].items() if key != "auto_map"}
        (directory / "config.json").write_text(json.dumps(config, indent=1))
        measured = {"bytes": transformers_bytes(record["hf_measured"])}
        measured |= {
            key: record["hf_measured"][key] for key in ("T", "state_bytes", "transformers")
        }
        models.append(
            {
                "name": name,
                "hf_id": record["hf_id"],
                "transformers": measured,
                "kvjax": ours(config, "kvjax"),
                "kvjax_hf_dynamic": ours(config, "hf-dynamic"),
                "peers": {p.name: ask(pythons[p.name], p, directory) for p in peers},
            }
        )
    versions = [
        {"name": p.name, "version": p.version, "installed": p.packages + p.alone} for p in peers
    ]
    return {"tokens": TOKENS, "batch": 1, "itemsize": 2, "peers": versions, "models": models}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", type=Path, default=CONFIGS, help="published.json")
    parser.add_argument(
        "--work", type=Path, help="directory of the environments; default: a new one"
    )
    parser.add_argument("--cookbook", type=Path, help="clone of EleutherAI/cookbook, bare or not")
    arguments = parser.parse_args()
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="calculators-"))).resolve()
    (work / "configs").mkdir(parents=True, exist_ok=True)
    peers = [peer for peer in PEERS if peer.name != "cookbook"]
    if arguments.cookbook:
        source = f"{COOKBOOK_COMMIT}:{COOKBOOK_FILE}"
        show = ["git", "-C", str(arguments.cookbook), "show", source]
        script = subprocess.run(show, check=True, capture_output=True, text=True).stdout
        (work / "configs" / Path(COOKBOOK_FILE).name).write_text(script)
        peers = list(PEERS)
    records = {
        record["name"]: record for record in json.loads(arguments.configs.read_text())["models"]
    }
    results = compare(records, work, peers)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}")
    print(table(results))


if __name__ == "__main__":
    main()
