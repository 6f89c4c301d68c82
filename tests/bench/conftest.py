"""Runs made short, and an interpreter whose torch is a few lines of numpy."""

import sys
import textwrap

import pytest

from kvjax.bench import bandwidth, decode_attention, decode_step, timing

FAKE_TORCH = '''\
    #!{python}
    """Runs the program it is given, as an interpreter would, with a stand-in for torch."""
    import runpy, sys, types
    import ml_dtypes
    import numpy as np

    class Tensor(np.ndarray):
        def clone(self): return self.copy()
        def float(self): return self.astype(np.float32)

    def attention(q, k, v, enable_gqa):
        assert enable_gqa
        k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1).float() for x in (k, v))
        scores = q.float() @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True) @ v).astype(q.dtype)

    class Mode:
        def __enter__(self): pass
        def __exit__(self, *error): pass

    torch = types.ModuleType("torch")
    torch.__version__ = "0.fake"
    torch.float32, torch.bfloat16 = np.dtype("float32"), np.dtype(ml_dtypes.bfloat16)
    torch.float16 = np.dtype("float16")
    torch.set_num_threads = lambda threads: None
    torch.inference_mode = Mode
    torch.frombuffer = lambda raw, dtype: np.frombuffer(raw, dtype).view(Tensor)
    functional = types.SimpleNamespace(scaled_dot_product_attention=attention)
    torch.nn = types.SimpleNamespace(functional=functional)
    sys.modules["torch"] = torch
    print("noise that libraries make", file=sys.stderr)
    assert sys.argv[1] == "-P"
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
'''


@pytest.fixture
def script(tmp_path):
    """Write an executable program; returns its path."""

    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        path.chmod(0o755)
        return str(path)

    return write


@pytest.fixture
def fake_torch(script):
    return script("python-with-torch", FAKE_TORCH.format(python=sys.executable))


@pytest.fixture
def quick(monkeypatch):
    """One call a sample and small memory probes, however much the command takes."""
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0.0)
    for module in (decode_attention, decode_step):
        monkeypatch.setattr(module, "probes", lambda _: bandwidth.probes(2**16))
