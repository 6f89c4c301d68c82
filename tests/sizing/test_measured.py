"""Against transformers: bytes that its caches really held and parameters that its models have."""

import json
from pathlib import Path

import pytest

from kvjax import sizing

MEASURED = json.loads(Path(__file__).with_name("measured.json").read_text())
PUBLISHED = {record["name"]: record for record in MEASURED["published"]}
TINY = {record["name"]: record for record in MEASURED["tiny"]}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model(name):
    record = PUBLISHED[name]
    spec = sizing.load(record["config"])
    found = spec.cache_bytes(record["tokens"], codec="bf16")
    windows = {layer.window for layer in spec.layers} - {None}
    if windows:
        # Every layer of these models has the window, and it is full: transformers' DynamicCache
        # keeps W - 1 of the W keys between steps, a ring of this library W.
        (window,) = windows
        assert found.allocated * (window - 1) == record["kv_bytes"] * window
    else:
        assert found.allocated == record["kv_bytes"]
    assert found.ideal == found.read_per_step == found.allocated
    assert found.state == 0


@pytest.mark.parametrize("name", TINY)
def test_tiny_model_against_the_static_cache(name):
    record = TINY[name]
    found = sizing.load(record["config"]).cache_bytes(record["capacity"], record["batch"], "f32")
    assert found.allocated == record["static_kv_bytes"]


@pytest.mark.parametrize("record", [*PUBLISHED.values(), *TINY.values()], ids=lambda r: r["name"])
def test_parameters(record):
    assert sizing.load(record["config"]).parameters == record["parameters"]


def test_the_families_are_all_measured():
    measured = {record["config"]["model_type"] for record in MEASURED["published"]}
    own = {name for name in sizing.READERS if name.startswith("kvjax_")}
    assert measured == set(sizing.READERS) - own
