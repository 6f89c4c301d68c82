"""What the report of a conversion to latents says."""

import json

import pytest

from kvjax.convert import Comparison, MlaReport


def report(kl: float | None) -> MlaReport:
    compared = None if kl is None else Comparison(256, kl, 0.5, 2.0, 2.5)
    return MlaReport(
        model_type="kvjax_mla",
        source_model_type="llama",
        way="transmla",
        settings={"fold": 2},
        latent_rank=96,
        rope_heads=1,
        rope_dim=32,
        seed=0,
        calibration_tokens=1024,
        key_error=0.1,
        value_error=0.2,
        rope_energy=0.7,
        bytes_per_token_before=1024,
        bytes_per_token_after=256,
        parameters_before=5000,
        parameters_after=6000,
        comparison=compared,
    )


@pytest.mark.parametrize(
    ("kl", "usable", "word"), [(0.99, True, "yes"), (1.0, False, "no"), (None, None, "")]
)
def test_a_rank_is_usable_near_its_source(kl, usable, word):
    given = report(kl)
    assert json.loads(json.dumps(given.figures()))["usable"] is usable
    assert given.columns()[-1] == word
    assert dict(given.rows()).get("usable untrained", "") == word


def test_rows_hold_the_figures():
    rows = dict(report(0.5).rows())
    assert rows["way"] == "transmla, fold 2"
    assert rows["rope keys"] == "1 × 32"
    assert rows["cache per token, bf16"] == "1,024 B → 256 B"
    assert len(MlaReport.COLUMNS) + 1 == len(report(0.5).columns())
