"""Caches that transformers really held, against what is read off the same configs.

`published.json` holds published configs with the bytes of a full-size model's cache;
`measured_tiny.json` tiny random models of many families, run on CPU; `hf_families.json` more of
both, by `scripts/measure_hf_caches.py`. All by transformers 5.24.
"""

import json
from pathlib import Path

import pytest

from kvjax import sizing

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "published.json").read_text())["models"]
TINY = json.loads((HERE / "measured_tiny.json").read_text())["records"]
FAMILIES = json.loads((HERE / "hf_families.json").read_text())


# Bytes a token in bf16 of published models that no class of transformers reads.
UNMEASURED = {
    "Qwen-1.8B (v1)": 24 * 2 * 16 * 128 * 2,
    "Phi-3-small-8k": 32 * 2 * 8 * 128 * 2,
    "InternLM2-20B": 48 * 2 * 8 * 128 * 2,
}
# Families that are refused, since what they cache are not keys and values.
REFUSED = {"reformer": "buckets and hidden states", "xlnet": "hidden states"}
# Records whose StaticCache this library does not describe.
OTHER_STATIC = {
    "mllama/image": "the cache of the image has a row for each token, too",
    "unlimited_ocr": "the prompt's keys are kept twice",
}
# Records that call the keys of the prompt, which are kept beside those of a window, states.
PROMPT_IN_STATE = {"unlimited_ocr"}


def by_name(records: list[dict]) -> list:
    return [
        pytest.param(record, id=record.get("name", record.get("model_type"))) for record in records
    ]


def check(found: sizing.CacheBytes, kv_bytes: int, state_bytes: int, record: dict) -> None:
    if record["model_type"] in PROMPT_IN_STATE:
        assert found.allocated + found.state == kv_bytes + state_bytes
    else:
        assert (found.allocated, found.state) == (kv_bytes, state_bytes)


def check_tiny(record: dict) -> None:
    spec = sizing.load(record["config"])
    prompt = record["prefill"]
    for codec, measured in (("f32", record), ("bf16", record.get("bf16"))):
        for tokens, when in ((prompt, "prefill"), (prompt + record["decode_steps"], "decode")):
            if measured is None or measured.get(f"kv_bytes_{when}") is None:
                continue
            found = spec.cache_bytes(
                tokens,
                record["batch"],
                codec,
                source_tokens=record.get("source_tokens") or 0,
                definition="hf-dynamic",
            )
            check(found, measured[f"kv_bytes_{when}"], measured[f"state_bytes_{when}"], record)
    if record["static_kv_bytes"] is not None and record["name"] not in OTHER_STATIC:
        found = spec.cache_bytes(
            record["static_max_cache_len"],
            record["batch"],
            "f32",
            source_tokens=record.get("source_tokens") or 0,
            definition="hf-static",
        )
        check(found, record["static_kv_bytes"], record["static_state_bytes"], record)


@pytest.mark.parametrize("record", by_name(PUBLISHED))
def test_published_models(record):
    spec = sizing.load(record["config"])
    measured = record.get("hf_measured")
    if measured is None:
        assert spec.bytes_per_token() == UNMEASURED[record["name"]]
        return
    found = spec.cache_bytes(measured["T"], measured["batch"], definition="hf-dynamic")
    assert found.allocated == measured["kv_bytes"]
    assert found.state == measured["state_bytes"]


@pytest.mark.parametrize("record", by_name(TINY))
def test_tiny_models(record):
    check_tiny(record)


@pytest.mark.parametrize("record", by_name(FAMILIES["records"]))
def test_more_families(record):
    if record["model_type"] in REFUSED:
        with pytest.raises(ValueError, match="model_type: got"):
            sizing.load(record["config"])
    else:
        check_tiny(record)


@pytest.mark.parametrize("record", by_name(FAMILIES["defaults"]))
def test_defaults_of_families(record):
    # These models were made in bf16, as a checkpoint that states its dtype is.
    spec = sizing.load({**record["config"], "dtype": "bfloat16"})
    found = spec.cache_bytes(
        record["T"], source_tokens=record.get("source_tokens") or 0, definition="hf-dynamic"
    )
    check(found, record["kv_bytes"], record["state_bytes"], record)
