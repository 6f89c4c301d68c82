"""Kernels as simulations, against float64; and a limit of time, since a barrier's fault hangs."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from kvjax.bench.gpu.oracle import Difference, difference
from kvjax.bench.gpu.shape import DTYPES, DecodeShape, attend, operands, queries
from kvjax.ops import mosaic
from kvjax.ops.devices import Gpu

# Seconds that a case takes are about one; the process is ended after so many.
TIME_LIMIT = 240
# Of float32 sums, in natural logarithms.
LSE_ACCURACY = 2e-5


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if item.path.parent.name == "kernels":
            item.add_marker(pytest.mark.timeout(TIME_LIMIT, method="thread"))


def accuracy(shape: DecodeShape) -> Difference:
    """One rounding of the weights and one of the output, to the dtypes of products and queries."""
    names = {shape.query, "bf16" if shape.codec == "int8" else shape.query}
    return Difference(max(float(jnp.finfo(DTYPES[name]).eps) for name in names), LSE_ACCURACY)


def poisoned(shape: DecodeShape) -> dict:
    """Operands with NaN in all that is not seen, what lies before a window in rows included."""
    made = operands(shape, poisoned=True)
    rows_of_floats = not shape.page_size and not shape.rope_dim and shape.codec != "int8"
    if shape.window is None or not rows_of_floats:
        return made
    before = np.arange(shape.slots) < shape.live[..., None] - shape.window
    for name in ("k", "v"):
        nan = jnp.asarray(jnp.nan, made[name].dtype)
        made[name] = jnp.where(before[..., None], nan, made[name])
    return made


@pytest.fixture(autouse=True)
def forgets_what_failed() -> Iterator[None]:
    """A kernel that raised leaves the state of its simulation behind."""
    yield
    interpret_pallas_call.reset_gpu_interpret_mode_state()


@pytest.fixture
def simulate(monkeypatch, capfd) -> Callable[..., Difference]:
    """Run the kernel of a GPU on a shape; gives what it differs from float64 by.

    Races are looked for. `multiprocessors` decides on how many splits there are.
    """

    def run(shape: DecodeShape, capability=(9, 0), multiprocessors=4) -> Difference:
        monkeypatch.setattr(mosaic, "INTERPRETED", Gpu(capability, multiprocessors))
        q, arrays = queries(shape), poisoned(shape)
        out, lse = jax.jit(
            lambda q, arrays: attend(shape, q, arrays, return_lse=True, interpret=True)
        )(q, arrays)
        found = difference(shape, q, arrays, out, lse)
        # jax 0.11 prints what 0.12 raises.
        assert "RACE DETECTED" not in "".join(capfd.readouterr())
        return found

    return run
