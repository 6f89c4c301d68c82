"""AdamW with clipping, and the learning rate over the steps."""

from __future__ import annotations

import jax
import optax

from kvjax.models.family import path_name
from kvjax.nn import Decoder
from kvjax.train.config import UptrainConfig

# The cosine ends at this share of the peak, as in Llama 2 (arXiv:2307.09288, section 2.2).
FINAL_SHARE = 0.1
_PROJECTIONS = (".kernel", ".k_up", ".v_up")  # the last two: from latents to heads


def learning_rate(config: UptrainConfig) -> optax.Schedule:
    """Learning rate of the steps, counted from 1: the first moves, the last is the cosine's end."""
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:
        after = optax.cosine_decay_schedule(peak, max(config.total_steps - warmup, 1), FINAL_SHARE)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def build_optimizer(config: UptrainConfig) -> optax.GradientTransformation:
    """Clipping, then AdamW at learning rate 1.

    The step multiplies the update by `learning_rate` itself, from the one counter in its state: no
    second counter can then start again at 0 when a run is resumed.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            1.0, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=decayed
        ),
    )


def decayed(model: Decoder) -> Decoder:
    """True for what weight decay shrinks: projections, that is, all matrices but embeddings.

    Norm scales and biases are left alone, and so are embeddings, as in OLMo 2 (arXiv:2501.00656): a
    short run rarely or never sees most tokens, and would only shrink their rows.
    """
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: path_name(keys).endswith(_PROJECTIONS), model
    )
