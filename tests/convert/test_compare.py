"""The comparison of two models, held against scipy and against transformers' logits."""

import numpy as np
import pytest
from scipy.special import log_softmax, rel_entr, softmax

from kvjax.convert import to_gqa
from kvjax.convert.compare import compare, evaluation_windows


@pytest.fixture(scope="module")
def reference(golden):
    """The first row of llama_mha's input ids (24,) and its logits (24, V) by transformers."""
    reference = np.load(golden / "llama_mha" / "ref.npz")
    return reference["input_ids"][0], reference["logits"][0].astype(np.float64)


@pytest.fixture(scope="module")
def converted(golden, reference, tmp_path_factory):
    """llama_mha with one KV head: its directory and its comparison on the reference's tokens."""
    directory = tmp_path_factory.mktemp("converted")
    np.save(directory / "tokens.npy", reference[0])
    stages = []
    report = to_gqa(
        golden / "llama_mha",
        directory / "mqa",
        1,
        evaluate_on=directory / "tokens.npy",
        on_progress=lambda *stage: stages.append(stage),
    )
    assert stages[-2:] == [("comparing", 1, 2), ("comparing", 2, 2)]
    return directory / "mqa", report.comparison


def test_figures_are_those_of_scipy(converted, reference, forward):
    directory, comparison = converted
    tokens, source = reference
    logits = forward(directory, tokens[None])[0].astype(np.float64)
    kl = rel_entr(softmax(source, axis=-1), softmax(logits, axis=-1)).sum(axis=-1)
    losses = [-log_softmax(x, axis=-1)[range(23), tokens[1:]].mean() for x in (source, logits)]
    assert comparison.tokens == 24
    assert comparison.kl == pytest.approx(kl.mean(), rel=1e-4)
    assert comparison.kl > 0.1
    same = source.argmax(-1) == logits.argmax(-1)
    assert comparison.top1_agreement == pytest.approx(np.mean(same))
    found = [comparison.source_loss, comparison.converted_loss]
    assert found == pytest.approx(losses, rel=1e-5)


def test_windows_are_read_on_their_own_and_averaged(golden, converted, reference):
    directory, _ = converted
    halves = reference[0].reshape(2, 12)
    both = compare(golden / "llama_mha", directory, halves, is_text=True)
    one = [compare(golden / "llama_mha", directory, half[None], is_text=True) for half in halves]
    for figure in ("kl", "top1_agreement", "source_loss", "converted_loss"):
        assert getattr(both, figure) == pytest.approx(np.mean([getattr(c, figure) for c in one]))
    assert both.tokens == 24


def test_a_model_agrees_with_itself(golden):
    windows = evaluation_windows(golden / "llama_mha", None, 100, seed=0)
    same = compare(golden / "llama_mha", golden / "llama_mha", windows, is_text=False)
    assert (same.tokens, same.kl, same.top1_agreement) == (64, 0.0, 1.0)
    assert same.source_loss is None
    assert same.converted_loss is None


def test_windows_fit_the_positions_of_the_model(golden, tmp_path):
    windows = evaluation_windows(golden / "gpt2_conv1d", None, 200, seed=0)
    positions = 48
    assert windows.shape == (200 // positions, positions)
    assert windows.dtype == np.int32
    assert 0 <= windows.min() < windows.max() < 96
    np.testing.assert_array_equal(
        windows, evaluation_windows(golden / "gpt2_conv1d", None, 200, seed=0)
    )
    assert (windows != evaluation_windows(golden / "gpt2_conv1d", None, 200, seed=1)).any()
    np.save(tmp_path / "tokens.npy", np.arange(30))
    given = evaluation_windows(golden / "gpt2_conv1d", tmp_path / "tokens.npy", 20, seed=0)
    np.testing.assert_array_equal(given, np.arange(20)[None])
