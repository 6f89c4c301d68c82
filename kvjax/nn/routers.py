"""Which experts a token passes through, and the weight of each: functions of the router's logits.

Top-k routing: Shazeer et al., arXiv:1701.06538. A `Router` states where families differ:

  Router()
      the k largest of a softmax, divided by their sum, which is the softmax over their own logits
      alone: Mixtral (arXiv:2401.04088, section 2.1), gpt-oss, Qwen3-MoE
  Router(normed=False, scale=s)
      not divided: DeepSeek-V2 (arXiv:2405.04434, section 2.2), "greedy"
  Router(normed=False, scale=s, groups=Groups(8, 3))
      from the groups with the best expert: DeepSeek-V2, "group_limited_greedy"
  Router("sigmoid", scale=s, groups=Groups(8, 4, judged_by=2), corrected=True)
      each expert is scored on its own, and chosen by its score and a bias: DeepSeek-V3
      (arXiv:2412.19437, section 2.1.2)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
}
# Sigmoids of all chosen experts may vanish; transformers adds as much.
_TINY = 1e-20


@dataclass(frozen=True)
class Groups:
    """Experts in equal groups of neighbours, a few of which a token may choose from.

    Attributes:
      count: how many groups there are.
      kept: how many of them are left to choose from.
      judged_by: a group is worth the sum of its so many best experts.
    """

    count: int
    kept: int
    judged_by: int = 1

    def check(self, experts: int, chosen: int) -> None:
        """ValueError unless so many experts can be grouped so, and so many be chosen then."""
        for name, given, largest in (
            ("count", self.count, experts),
            ("kept", self.kept, self.count),
            ("judged_by", self.judged_by, experts // max(self.count, 1)),
        ):
            if not 1 <= given <= largest:
                raise ValueError(f"groups.{name}: got {given}; accepted: 1 to {largest}")
        if experts % self.count:
            raise ValueError(
                f"groups.count: got {self.count}; accepted: a divisor of {experts} experts"
            )
        left = self.kept * (experts // self.count)
        if chosen > left:
            raise ValueError(f"chosen: got {chosen}; accepted: 1 to {left} experts of the groups")

    def limit(self, scores: Array) -> Array:
        """Scores (M, E), those in other groups than a token's best ones -inf."""
        grouped = scores.reshape(len(scores), self.count, -1)
        worth = jax.lax.top_k(grouped, self.judged_by)[0].sum(-1)
        best = jax.lax.top_k(worth, self.kept)[1]
        kept = (best[..., None] == jnp.arange(self.count)).any(axis=1)
        return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(scores.shape)


@dataclass(frozen=True)
class Router:
    """Logits -> the experts that each token passes through, and their weights.

    Attributes:
      score: "softmax" over all experts, or the "sigmoid" of each.
      normed: whether the scores of a token's experts are divided by their sum.
      scale: factor of the weights.
      groups: limits the choice to groups of experts; None for a choice among all.
      corrected: whether a bias of each expert is added to the scores that it is chosen by, and
        that groups are judged by. Weights are of the scores alone.
    """

    score: str = "softmax"
    normed: bool = True
    scale: float = 1.0
    groups: Groups | None = None
    corrected: bool = False

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"score={self.score!r}: accepted are {', '.join(map(repr, SCORES))}")

    def check(self, experts: int, chosen: int) -> None:
        """ValueError unless a token can choose so many of so many experts."""
        if not 1 <= chosen <= experts:
            raise ValueError(f"chosen: got {chosen}; accepted: 1 to {experts} experts")
        if self.groups is not None:
            self.groups.check(experts, chosen)

    def __call__(
        self, logits: Array, chosen: int, correction: Array | None = None
    ) -> tuple[Array, Array]:
        """The experts of each token, best first; of equals the one with the smaller index.

        Args:
          logits: (M, E) float32, of M tokens for E experts.
          chosen: how many experts each token passes through, k.
          correction: (E,) float32, where the router is `corrected`.

        Returns:
          picked (M, k) int32, and weights (M, k) float32.
        """
        scores = SCORES[self.score](logits)
        merit = scores if correction is None else scores + correction
        if self.groups is not None:
            merit = self.groups.limit(merit)
        picked = jax.lax.top_k(merit, chosen)[1]
        weights = jnp.take_along_axis(scores, picked, axis=-1)
        if self.normed:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + _TINY)
        return picked, self.scale * weights
