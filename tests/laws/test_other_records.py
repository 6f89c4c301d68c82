"""Laws 2 to 4 for records that are no keys and values of heads."""

from typing import NamedTuple

import jax
import pytest
from flax import nnx

from kvjax import sizing
from kvjax.cache import Kivi, Paged, init_layer_cache
from kvjax.engine import decode
from kvjax.nn import (
    LatentAttentionConfig,
    Rope,
    TensorProductAttentionConfig,
    TiedAttentionConfig,
)
from kvjax.nn.sharing import AnyAttentionConfig
from laws.compiled import (
    SLACK,
    Step,
    assert_in_place,
    assert_loops_follow_the_length,
    assert_only_tokens_are_written,
    compiled,
    growth_with_capacity,
    growth_with_group,
    measure,
)
from laws.members import CODECS

LAYERS = (0, 1)


class Kind(NamedTuple):
    """Settings of a module, and of the layer that sizing is told of."""

    config: AnyAttentionConfig
    spec: sizing.LayerSpec


KINDS = {
    "latent": Kind(
        LatentAttentionConfig(64, 8, 64, 16, 32, 32, Rope(16)),
        sizing.LayerSpec(8, 1, 48, 32, kind="latent", latent_rank=64, rope_dim=16),
    ),
    "several latents": Kind(
        LatentAttentionConfig(64, 8, 32, 16, 32, 32, Rope(16), latents=2),
        sizing.LayerSpec(8, 2, 48, 32, kind="latent", latent_rank=32, rope_dim=16),
    ),
    "tied": Kind(
        TiedAttentionConfig(64, 8, 4, 32, Rope(16)),
        sizing.LayerSpec(8, 4, 32, 32, kind="tied", rope_dim=16),
    ),
    "factors": Kind(
        TensorProductAttentionConfig(64, 8, 32, key_rank=3, value_rank=2),
        sizing.LayerSpec(8, 8, 32, 32, kind="factors", key_rank=3, value_rank=2),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", [*CODECS, Kivi(4, group=8, residual=16)], ids=str)
@pytest.mark.parametrize("layout", ["dense", Paged(8)], ids=str)
def test_the_formula_is_the_array(kind, layout, codec):
    """Law 2."""
    config, spec = KINDS[kind]
    model = sizing.ModelSpec("one", config.d_model, (spec,))
    pages = {"page_size": layout.page_size} if isinstance(layout, Paged) else {}
    for batch, capacity in ((1, 16), (3, 64)):
        cache = jax.eval_shape(
            lambda batch=batch, capacity=capacity: init_layer_cache(
                batch,
                capacity,
                kv_heads=config.kv_heads,
                value_heads=config.value_heads,
                key_dim=config.key_dim,
                value_dim=config.value_dim,
                layout=layout,
                codec=codec,
                rope_key=config.rope_key,
            )
        )
        live = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
        said = codec.spec if isinstance(codec, Kivi) else codec
        assert live == model.cache_bytes(capacity, batch, said, **pages).total


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_the_formula(kind):
    config, spec = KINDS[kind]
    module = jax.eval_shape(lambda: config.build("float32", nnx.Rngs(0)))
    kernels = [leaf for leaf in jax.tree.leaves(module) if leaf.ndim > 1]
    assert sum(leaf.size for leaf in kernels) == spec.attention_parameters(config.d_model)


@pytest.mark.parametrize(
    "step",
    [
        *(
            Step(1, record=record, producers=LAYERS)
            for record in ("latent", "several latents", "tied", "factors")
        ),
        Step(1, record="latent", producers=LAYERS, codec="fp8_ds_mla"),
        *(
            pytest.param(
                Step(tokens, record="latent", producers=LAYERS, layout=layout, codec="fp8_ds_mla"),
                marks=pytest.mark.slow,
            )
            for tokens, layout in ((8, "pages"), (8, "dense"), (1, "ring"), (1, "kept"))
        ),
        *(
            pytest.param(
                Step(tokens, record=record, producers=LAYERS, layout=layout, codec=codec),
                marks=pytest.mark.slow,
            )
            for record in ("latent", "several latents", "tied", "factors")
            for tokens, layout, codec in (
                (8, "dense", "f32"),
                (8, "pages", "int8"),
                (1, "ring", "bf16"),
            )
        ),
    ],
    ids=lambda step: f"{step.record} {step.tokens}, {step.layout}, {step.codec}",
)
class TestCompiledStep:
    """Laws 3 and 4."""

    def test_the_cache_is_written_in_place(self, step):
        assert_in_place(measure(decode, step))
        assert_only_tokens_are_written(compiled(decode, step).as_text(), step)

    def test_nothing_is_expanded(self, step):
        """Temporaries grow neither with the capacity nor with the heads that read a record."""
        assert abs(growth_with_capacity(decode, step)) <= SLACK
        assert growth_with_group(decode, step) <= SLACK

    def test_cost_follows_the_live_length(self, step):
        assert_loops_follow_the_length(compiled(decode, step).as_text(), len(LAYERS))
