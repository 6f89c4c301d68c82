import numpy as np
import pytest

from kvjax.bench import peers
from kvjax.bench.case import Case, Inputs
from kvjax.bench.peers import BUILDERS, AbsentError
from kvjax.bench.torch_peer import TorchWorker


def attention(case: Case, inputs: Inputs) -> np.ndarray:
    """Softmax attention in float64, head by head."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (inputs.q, inputs.k, inputs.v))
    out = np.empty(q.shape)
    for b in range(case.batch):
        for n in range(case.query_heads):
            head = n // (case.query_heads // case.kv_heads)
            weights = np.exp(k[b, head, : case.length] @ q[b, n] / np.sqrt(case.head_dim))
            out[b, n] = weights @ v[b, head, : case.length] / weights.sum()
    return out


@pytest.fixture
def builders(fake_torch):
    worker = TorchWorker(fake_torch)
    yield {**BUILDERS, "torch": worker.contender}
    worker.close()


@pytest.mark.parametrize(
    ("capacity", "codec", "tolerance"), [(48, "f32", 1e-6), (70, "f32", 1e-6), (70, "bf16", 0.02)]
)
def test_all_compute_the_same(builders, capacity, codec, tolerance):
    case = Case(3, 8, 2, 16, length=48, capacity=capacity, codec=codec)
    inputs = Inputs(case)
    expected = attention(case, inputs)
    for name, build in builders.items():
        contender = build(case, inputs)
        assert contender.sample(2) > 0
        np.testing.assert_allclose(contender.output, expected, atol=tolerance, err_msg=name)


def test_flax_decodes_the_same_token_in_every_call(monkeypatch):
    """It is the one whose call changes its cache."""
    case = Case(2, 4, 2, 8, length=5, capacity=7, codec="f32")
    outputs = []

    def watch(step, case):
        outputs.extend(np.asarray(step()).reshape(2, 4, 8) for _ in range(4))

    monkeypatch.setattr(peers, "build_contender", watch)
    inputs = Inputs(case)
    peers.flax_nnx(case, inputs)
    assert len(outputs) == 4
    for output in outputs:
        np.testing.assert_allclose(output, attention(case, inputs), atol=1e-6)


def test_what_jax_nn_cannot_do_is_said():
    case = Case(1, 2, 1, 8, length=4, capacity=4, codec="f16")
    for name in ("jax.nn", "flax.nnx"):
        with pytest.raises(AbsentError, match="takes no f16 on CPUs"):
            BUILDERS[name](case, Inputs(case))
    assert BUILDERS["kvjax"](case, Inputs(case)).output.shape == (1, 2, 8)
