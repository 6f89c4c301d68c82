"""Configs with a field of the wrong kind are refused with one line, or the field does not matter.

Each field of a tiny model of every family is replaced in turn by one of the values below, which are
dealt out over fields and families.
"""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvjax import sizing

RECORDS = json.loads(Path(__file__).with_name("hf_families.json").read_text())["records"]
CONFIGS = {record["model_type"]: record["config"] for record in RECORDS}
WRONG = (
    *(None, True, 0, -1, 8.0, math.nan, math.inf, 10**30, "", "8", [], {}),
    *([1], [None], {"a": 1}, {"0": 1}),
    *([value] * 4 for value in (0, -1, 1.5, None, "8", [1], {}, "full_attention")),
)


def replaced(config: dict, wrong: Iterator) -> Iterator[dict]:
    """The config with one field, its own or one of a part, replaced by a wrong value."""
    for name, value in config.items():
        if name == "model_type":
            continue
        yield {**config, name: next(wrong)}
        if isinstance(value, dict):
            yield from ({**config, name: part} for part in replaced(value, wrong))


@pytest.mark.parametrize("model_type", CONFIGS)
def test_wrong_kinds(model_type):
    # Families begin with different values, so that a field of many of them meets most.
    wrong = itertools.islice(itertools.cycle(WRONG), sum(model_type.encode()) % len(WRONG), None)
    for config in replaced(CONFIGS[model_type], wrong):
        try:
            spec = sizing.load(config)
        except ValueError as error:
            refusal = str(error)
        else:
            sizing.report(spec, 33, 2)
            continue
        assert "accepted" in refusal, config
        assert "\n" not in refusal, config
