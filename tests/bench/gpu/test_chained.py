import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.bench.gpu import chained
from kvjax.bench.gpu.chained import Chain
from kvjax.bench.timing import Timing


@pytest.mark.parametrize("chain", [Chain(), Chain(1, 3), Chain(2, 1), Chain(3, 4)])
def test_each_call_takes_the_next_copy_and_the_last_output(chain):
    """The steps do not commute, so that only their order gives this end."""
    operands = [jnp.float32(i + 2) for i in range(chain.copies)]
    first, last = jax.jit(chain.program(lambda x, one: x * one + 1))(jnp.float32(1), operands)
    x = np.float32(1)
    seen = []
    for call in range(chain.calls):
        x = x * np.float32(call % chain.copies + 2) + 1
        seen.append(x)
    assert chain.calls == 1 + chain.copies * chain.laps
    assert first == seen[0]
    assert last == seen[-1]


def test_the_number_of_laps_is_known_to_the_compiler():
    """A GPU's host would otherwise read the condition back after each."""
    chain = Chain(2, 7)
    program = jax.jit(chain.program(lambda x, one: x * one))
    text = program.lower(jnp.ones(3), [jnp.ones(3)] * 2).compile().as_text()
    assert '"known_trip_count":{"n":"7"}' in text


def test_no_copy_is_sliced_out_of_others():
    chain = Chain(3, 2)
    big = [jnp.ones((64, 1024)) for _ in range(3)]
    program = jax.jit(chain.program(lambda x, one: (one @ x[:1024])[0] * x))
    memory = program.lower(jnp.ones(1024), big).compile().memory_analysis()
    assert memory.temp_size_in_bytes < big[0].nbytes / 2


def test_a_chain_exceeds_the_cache_and_its_dispatch():
    rate = 4.8e12
    assert chained.plan(2 * 10**9, rate) == Chain()
    assert chained.plan(chained.TIMES_L2 * chained.L2_BYTES, rate) == Chain()
    for nbytes in (10**5, 10**7, 10**8, 399 * 10**6):
        chain = chained.plan(nbytes, rate)
        together = chain.copies * nbytes
        assert together >= chained.TIMES_L2 * chained.L2_BYTES or chain.copies == 32
        assert chain.laps * together / rate >= chained.PROGRAM_SECONDS
        assert (chain.laps - 1) * together / rate < chained.PROGRAM_SECONDS
    assert chained.plan(2 * 10**9, rate, copies=2) == Chain(2, 2)


def test_a_program_is_as_long_as_its_calls():
    assert Chain(2, 3).per_call(Timing(5, (7.0, 14.0))) == Timing(35, (1.0, 2.0))
