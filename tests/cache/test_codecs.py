import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Record
from kvjax.cache.codecs import build_codec

RECORD = Record(
    jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 3, 4)), jnp.float32),
    jnp.asarray(np.random.default_rng(1).normal(size=(1, 2, 3, 5)), jnp.float32),
)
# Half a unit in the last place, of a number's size: 2**-p for p bits of significand.
BOUNDS = {"f32": 0.0, "bf16": 2**-8, "f16": 2**-11}


@pytest.mark.parametrize(("name", "bound"), BOUNDS.items())
def test_what_is_read_back_is_within_the_bound(name, bound):
    codec = build_codec(name)
    leaves = codec.encode(RECORD)
    assert leaves["k"].shape == (1, 2, 3, 4)
    assert leaves["v"].shape == (1, 2, 3, 5)
    for original, decoded in zip(RECORD, codec.decode(leaves), strict=True):
        np.testing.assert_allclose(decoded.astype(jnp.float32), original, rtol=bound)
    if bound:
        assert any(np.any(leaves[part] != getattr(RECORD, part)) for part in "kv")


@pytest.mark.parametrize(("spelling", "name"), [("fp32", "f32"), ("fp16", "f16")])
def test_other_spellings(spelling, name):
    assert build_codec(spelling) == build_codec(name)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8"])
def test_a_codec_that_only_sizing_knows_is_refused(name):
    with pytest.raises(ValueError, match=f"codec='{name}': caches can hold f32, bf16, f16"):
        build_codec(name)
