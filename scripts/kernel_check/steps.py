"""Decode steps of a whole model: what its programs do beside the kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from kernel_check.budgets import Fault
from kernel_check.calls import Call, array, compile_call
from kernel_check.cases import ROWS, SLOTS, StepCase
from kernel_check.checking import SLACK, Checked, check_program, parts_bytes, refusal
from kernel_check.hlo import kernel_calls
from kvjax.cache import Cache, LayoutChoice, Paged
from kvjax.nn import AttentionConfig, Decoder, DecoderConfig, MlpConfig, Rope

# As wide as Llama 3 8B, but for the vocabulary.
LAYERS, VOCAB, D_MODEL, WIDTH = 2, 1024, 4096, 14336
QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
# Capacity of the longer of two caches, in that of the shorter.
LONGER = 4
# Hidden states, queries, and what products leave to be summed up.
ACTIVATION_BYTES = 2**20


def check_step(case: StepCase, target: str) -> Checked:
    """Compile a step for two capacities, and compare."""
    temporaries: list[int] = []
    merged: list[int] = []
    faults: list[Fault] = []
    for slots in (SLOTS, LONGER * SLOTS):
        call = step_call(case, slots)
        try:
            compiled = compile_call(call, target)
        except Exception as error:
            return Checked({}, [refusal(error)])
        parts = max(map(parts_bytes, compiled.plans), default=0)
        faults += check_program(call, compiled, parts + ACTIVATION_BYTES)
        kernels = kernel_calls(compiled.program.as_text())
        if kernels != LAYERS:
            faults.append(Fault("kernels", f"{kernels} kernels for {LAYERS} layers"))
        stats = compiled.program.memory_analysis()
        beside = stats.output_size_in_bytes - stats.alias_size_in_bytes
        if beside > ROWS * VOCAB * 4 + SLACK:
            faults.append(Fault("copies", f"{beside} bytes come out beside the cache; logits may"))
        temporaries.append(stats.temp_size_in_bytes)
        merged.append(parts)
    growth = temporaries[1] - temporaries[0] - (merged[1] - merged[0])
    if abs(growth) > SLACK:
        text = f"{growth} bytes more for {LONGER} times the capacity; {SLACK} are accepted"
        faults.append(Fault("temporaries", text))
    return Checked({"kernels": kernels, "temporaries": temporaries[0]}, faults)


def step_call(case: StepCase, slots: int, *, donate: bool = True) -> Call:
    """One token for each row of a cache with so many slots a row."""
    attention = AttentionConfig(
        d_model=D_MODEL,
        query_heads=QUERY_HEADS,
        kv_heads=KV_HEADS,
        key_dim=HEAD_DIM,
        value_dim=HEAD_DIM,
        rope=Rope(HEAD_DIM),
    )
    config = DecoderConfig(VOCAB, D_MODEL, attention=(attention,) * LAYERS, mlp=MlpConfig(WIDTH))
    model = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    layout: LayoutChoice = "dense" if case.page is None else Paged(case.page)
    cache = jax.eval_shape(lambda: model.init_cache(ROWS, slots, layout, case.codec))

    # As `engine.decode`, whose package needs more than there is to compile with.
    def step(model: Decoder, tokens: Array, cache: Cache, count: Array) -> Any:
        return model(tokens, cache, count=count)

    arguments = (model, array((ROWS, 1), "int32"), cache, array((ROWS,), "int32"))
    return Call(step, arguments, caches=(2,), donated=(2,) if donate else ())
