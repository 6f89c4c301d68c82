"""The settings of an uptraining run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class UptrainConfig:
    """Everything that decides the result of a run, apart from the model, the teacher and the data.

    Exactly one of `steps` and `alpha` is given.

    Attributes:
      steps: optimizer steps.
      alpha: the run's length as a share of `pretrain_tokens`, the tokens that the model was
        pre-trained on (arXiv:2305.13245 uses 0.05); rounded up to whole steps.
      pretrain_tokens: goes with `alpha`.
      seq_len: tokens that are predicted in each sequence.
      batch: sequences of one step.
      accumulate: parts that a batch is computed in, one after the other; divides `batch`.
      learning_rate: the peak.
      schedule: after the warm-up, "constant", or "cosine" down to a tenth of the peak.
      warmup_steps: steps over which the learning rate rises linearly to its peak.
      weight_decay: AdamW's (arXiv:1711.05101), of projection matrices alone.
      beta1, beta2: AdamW's decay rates of the moments.
      clip: the largest global norm of the gradient.
      compute_dtype: "f32", or "bf16" for forward and backward; masters and moments stay f32.
      remat: compute each layer's activations again in the backward pass instead of storing them.
      seed: of the order of the sequences.
      distill_weight: share w of distillation in the loss, where there is a teacher:
        (1 - w) * cross entropy + w * temperature^2 * KL(teacher || student), arXiv:1503.02531.
      temperature: divides the logits of both in that KL.
    """

    steps: int | None = None
    alpha: float | None = None
    pretrain_tokens: int | None = None
    seq_len: int = 512
    batch: int = 8
    accumulate: int = 1
    learning_rate: float = 3e-4
    schedule: str = "cosine"
    warmup_steps: int = 10
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    compute_dtype: str = "f32"
    remat: bool = False
    seed: int = 0
    distill_weight: float = 0.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.alpha is None):
            raise ValueError(
                f"steps={self.steps}, alpha={self.alpha}: exactly one of them is needed"
            )
        if (self.alpha is None) != (self.pretrain_tokens is None):
            raise ValueError(
                f"alpha={self.alpha}, pretrain_tokens={self.pretrain_tokens}: "
                "they are given together, or neither"
            )
        for names, accepted, fits in _RULES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not fits(value):
                    raise ValueError(f"{name}={value!r}: accepted is {accepted}")
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate} must divide batch={self.batch}")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step predicts."""
        return self.batch * self.seq_len

    @property
    def total_steps(self) -> int:
        """`steps`, or those that `alpha` makes."""
        if self.steps is not None:
            return self.steps
        assert self.pretrain_tokens is not None  # checked above
        # The decimal fraction that was written: in floats 0.07 * 100 is more than 7.
        tokens = Fraction(str(self.alpha)) * self.pretrain_tokens
        return math.ceil(tokens / self.tokens_per_step)


_RULES = (
    (("seq_len", "batch", "accumulate"), "an integer from 1 up", lambda n: n >= 1),
    (("steps", "pretrain_tokens", "warmup_steps"), "an integer from 0 up", lambda n: n >= 0),
    (("seed",), "an integer from 0 to 2^32 - 1", lambda n: 0 <= n < 2**32),
    (("alpha", "weight_decay"), "a number from 0 up", lambda x: 0 <= x < math.inf),
    (("learning_rate", "clip", "temperature"), "a number above 0", lambda x: 0 < x < math.inf),
    (("beta1", "beta2"), "a number from 0 to below 1", lambda x: 0 <= x < 1),
    (("distill_weight",), "a number from 0 to 1", lambda x: 0 <= x <= 1),
    (("schedule",), "constant or cosine", lambda name: name in ("constant", "cosine")),
    (("compute_dtype",), "f32 or bf16", lambda name: name in ("f32", "bf16")),
)
