import jax
import numpy as np
import pytest

from kvjax.train import held_out_loss


def expected_loss(model, tokens, seq_len):
    """Window by window, with nothing padded and nothing batched, in float64."""
    losses = []
    forward = jax.jit(model)
    for start in range(0, len(tokens) - 1, seq_len):
        window = np.asarray(tokens[start : start + seq_len + 1])
        logits = np.asarray(forward(window[None, :-1])[0][0], np.float64)
        chosen = logits[np.arange(len(window) - 1), window[1:]]
        losses.extend(np.log(np.exp(logits).sum(-1)) - chosen)
    assert len(losses) == len(tokens) - 1
    return np.mean(losses)


@pytest.mark.parametrize(
    "count",
    [
        2,  # one prediction
        17,  # one whole window
        25,  # and half of another
        49,  # a whole batch
        60,  # and a short window in the next
    ],
)
def test_every_token_but_the_first_counts_once(tiny, stream, count):
    got = held_out_loss(tiny, stream[:count], seq_len=16, batch=3)
    np.testing.assert_allclose(got, expected_loss(tiny, stream[:count], 16), rtol=1e-6)


def test_too_short_a_text_is_refused(tiny, stream):
    with pytest.raises(ValueError, match="1 tokens: at least 2"):
        held_out_loss(tiny, stream[:1], seq_len=16)
