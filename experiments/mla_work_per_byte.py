"""Whether MLA does as much work for each byte as MHA: by formula, by the compiler, by the clock.

The article (`docs/decode_time.md`) guesses that it does nearly. Forms of attention are compared at
DeepSeek-V3's 128 heads by arithmetic, their FLOP counted in compiled programs, and their steps
timed on a CPU at 16 heads, the size of the models of arXiv:2505.21487. Needs no model.

    python experiments/mla_work_per_byte.py [--quick] [--resume] [--out DIR]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Setup
from jax import Array
from mla_forms import Form, forms
from mla_work_page import draw, page
from study import Study

from kvjax import sizing
from kvjax.bench import result
from kvjax.bench.bandwidth import Bandwidth, probes
from kvjax.bench.timing import Sampler, interleave, time_calls
from kvjax.sizing.roofline import decode_floor

NAME, TITLE = "mla_work_per_byte", "Work per byte of MLA"
# The largest difference of what the forms of MLA give, as a share of the largest output.
TOLERANCE = 1e-4
CHIPS = ("H100-SXM", "H200", "B300", "TPU-v5e", "TPU-v5p", "TPU-v6e", "TPU-7x")
# Records of the two compiled programs that are compared; both are one block.
COUNTED = (32, 64)
# (B, cached tokens) of the floors.
STEPS = ((1, 4096), (1, 131_072), (64, 4096), (64, 32_768))


@dataclass(frozen=True)
class Sizes:
    """How large a run is.

    Attributes:
      rounds: samples of each contender.
      array_bytes: of the arrays that the memory's speed is measured on.
      matrix: rows and columns of the matrices that the speed of products is measured on.
      heads: N, of what is timed.
      counted: N, of what is compiled for its FLOP.
      shapes: (B, live tokens) of what is timed.
    """

    rounds: int = 7
    array_bytes: int = 2**28
    matrix: int = 2048
    heads: int = 16
    counted: tuple[int, ...] = (16, 128)
    shapes: tuple[tuple[int, int], ...] = ((1, 8192), (4, 8192), (1, 32_768))


QUICK = Sizes(3, 2**20, 256, 8, (8,), ((2, 64), (1, 128)))
# DeepSeek-V3's.
HEADS = 128

ABOUT = (
    "One decode step of attention, whose heads have keys and values of 128 channels; latents have "
    "512 and rope keys 64, as in DeepSeek-V3. GLA-2 (two latents of 256) and GTA-4 (four tied "
    "heads) are those of arXiv:2505.21487. Times are of a CPU. **GPU figures are pending**: this "
    "library's kernels have been compiled and simulated, and not yet been run on a GPU."
)


def measure(setup: Setup) -> dict[str, Any]:
    """Formulas, counts, and a run of its own for each shape."""
    sizes = QUICK if setup.quick else Sizes()
    return {
        "sizes": asdict(sizes),
        "ridges": {name: sizing.CHIPS[name].ridge for name in CHIPS},
        "formulas": {str(heads): formulas(heads) for heads in dict.fromkeys((HEADS, sizes.heads))},
        "floors": floors(),
        "counts": [
            setup.measured(f"FLOP, {heads} heads", counts, heads) for heads in sizes.counted
        ],
        "tables": [
            setup.measured(f"{batch} x {length:,} tokens", timed, batch, length, sizes)
            for batch, length in sizes.shapes
        ],
    }


def formulas(heads: int) -> list[dict[str, Any]]:
    """What each form does for one record of a long cache in bf16."""
    return [
        {
            "form": name,
            "bytes": form.bytes_read(1),
            "attention_flop": form.attention_flop(1),
            "expansion_flop": form.expansion_flop(1),
            "intensity_flop_per_byte": form.intensity,
        }
        for name, form in forms(heads).items()
    ]


def floors() -> list[dict[str, Any]]:
    """The least time of steps on each chip, and the ceiling that sets it."""
    rows = []
    for name, form in forms(HEADS).items():
        for batch, tokens in STEPS:
            work = form.work(batch, tokens)
            found = {chip: decode_floor(sizing.CHIPS[chip], work) for chip in CHIPS}
            rows.append(
                {
                    "form": name,
                    "batch": batch,
                    "tokens": tokens,
                    "intensity_flop_per_byte": work.matrix_flop / work.memory_bytes,
                    "seconds": {chip: floor.seconds for chip, floor in found.items()},
                    "binds": {chip: floor.binds for chip, floor in found.items()},
                }
            )
    return rows


def counts(heads: int) -> dict[str, Any]:
    """FLOP of one more record in each form's compiled step, beside the formula.

    XLA counts a loop's body once, whatever the trips. So the steps' loops are of one block, and
    what does not come with the records cancels in the difference of two blocks.
    """
    fewer, more = COUNTED
    rows = []
    for name, form in forms(heads).items():
        counted = (compiled_flop(form, more) - compiled_flop(form, fewer)) / (more - fewer)
        rows.append({"form": name, "flop": form.flop(1), "counted_flop": counted})
    return {"heads": heads, "rows": rows}


def compiled_flop(form: Form, slots: int) -> float:
    """FLOP, by XLA, of the step of one sequence in a cache of so many slots."""
    filled = jax.eval_shape(
        lambda module, key: form.filled(module, 1, slots, key), form.shape, jax.random.key(0)
    )
    x = jax.ShapeDtypeStruct((1, 1, form.shape.config.d_model), jnp.float32)
    return _jitted(form).lower(form.shape, x, filled).compile().cost_analysis()["flops"]


class Steps:
    """A sampler of decode steps, all of the same token: each forgets it again."""

    def __init__(self, form: Form, batch: int, length: int):
        module_key, x_key = jax.random.split(jax.random.key(0))
        self._module = form.build()
        filled = jax.jit(form.filled, static_argnums=(1, 2))
        self._cache = filled(self._module, batch, length, module_key)
        self._x = jax.random.normal(x_key, (batch, 1, self._module.config.d_model))
        self._take = _jitted(form)

    @property
    def parameter_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._module))

    def __call__(self, calls: int) -> float:
        seconds = time_calls(self.step, calls)
        self._cache.check()
        return seconds

    def step(self) -> Array:
        """Output (B, 1, D) of the newest token."""
        y, self._cache = self._take(self._module, self._x, self._cache)
        return y


def _jitted(form: Form) -> Any:
    """The step of module, x and cache, the cache donated."""

    def step(module: Any, x: Array, cache: Any) -> tuple[Array, Any]:
        before = cache.n
        y, cache = form.step(module, x, before[:, None], cache)
        # The next step writes the same token to the same slot.
        return y, replace(cache, n=before)

    return jax.jit(step, donate_argnums=2)


def timed(batch: int, length: int, sizes: Sizes) -> dict[str, Any]:
    """All forms, from one run.

    Raises:
      RuntimeError: forms of MLA do not compute the same.
    """
    all_forms = forms(sizes.heads)
    steps = {name: Steps(form, batch, length) for name, form in all_forms.items()}
    check_same({name: step for name, step in steps.items() if name.startswith("MLA")})
    moves = probes(sizes.array_bytes)
    product = _product(sizes.matrix)
    samplers: dict[str, Sampler] = {**steps, **moves, "product": partial(time_calls, product)}
    timings = interleave(samplers, sizes.rounds)
    bandwidth = Bandwidth.of(moves, timings)
    rows = []
    for name, form in all_forms.items():
        nbytes = batch * form.bytes_read(length, "f32") + steps[name].parameter_bytes
        flop = batch * (form.flop(length) + form.absorption_flop)
        about = {"batch": batch, "query_heads": sizes.heads, "length": length}
        rows.append(result.row(name, about, nbytes, flop, timings[name], bandwidth))
    return {
        "bandwidth": bandwidth.figures(),
        "product_flop_per_second": 2 * sizes.matrix**3 / timings["product"].median,
        "rows": rows,
    }


def check_same(steps: dict[str, Steps]) -> None:
    """RuntimeError where steps do not give the same."""
    outputs = {name: np.asarray(step.step()) for name, step in steps.items()}
    first, *others = outputs
    most = TOLERANCE * np.abs(outputs[first]).max()
    for name in others:
        # Written so that NaN fails.
        if not np.abs(outputs[name] - outputs[first]).max() <= most:
            raise RuntimeError(f"{name!r} and {first!r} differ")


def _product(size: int) -> Callable[[], Array]:
    """A product of two square matrices in f32."""
    a, b = (jax.random.normal(key, (size, size)) for key in jax.random.split(jax.random.key(0)))
    multiply = jax.jit(partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST))
    return lambda: multiply(a, b)


STUDY = Study(NAME, TITLE, ABOUT, measure, page, draw)
main = STUDY.main

if __name__ == "__main__":
    main()
