"""Eviction policies: what scores, what is protected, how budgets are spread. All of it is data.

A new policy is `dataclasses.replace` of one of these, or a `Policy` of a scorer of one's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from jax import Array

from kvjax.cache import Cache
from kvjax.evict import scorers
from kvjax.evict.budgets import Budgets, Pyramid, Uniform
from kvjax.evict.observe import Seen, observe
from kvjax.evict.select import Adaptive, Evenly, Heads, Protected, choose
from kvjax.nn import Decoder

_NONE, _UNIFORM, _EVENLY = Protected(), Uniform(), Evenly()


@dataclass(frozen=True)
class Policy:
    """How to evict; frozen and hashable, hence static under jit.

    Attributes:
      score: what gives each slot its score, of `kvjax.evict.scorers` or alike.
      observe: newest tokens whose queries it needs; None for all that are given, 0 for none.
      protected: tokens kept whatever they score.
      budgets: how the layers share the budget.
      heads: how the KV heads of a layer share its budget.
    """

    score: Callable[[Seen], Array]
    observe: int | None = 0
    protected: Protected = _NONE
    budgets: Budgets = _UNIFORM
    heads: Heads = _EVENLY

    def indices(
        self,
        model: Decoder,
        cache: Cache,
        tokens: Array | None,
        count: Array | None,
        budgets: tuple[int | None, ...],
    ) -> tuple[Array | None, ...]:
        """Slots that each layer keeps, (B, K or 1, m); None where its budget is None.

        tokens (B, T) are each row's newest, count (B,) of them real; see `observe`. To be called
        inside jit, with the budgets static.
        """
        return tuple(
            None
            if budget is None
            else choose(seen, self.score(seen), budget, self.protected, self.heads)
            for seen, budget in zip(observe(model, cache, tokens, count), budgets, strict=True)
        )


STREAMING_LLM = Policy(scorers.recency, protected=Protected(sinks=4))
H2O = Policy(scorers.total_mass, observe=None, protected=Protected(recent_share=0.5))
TOVA = Policy(scorers.shared_mass, observe=1)
SNAPKV = Policy(scorers.pooled_mass, observe=64, protected=Protected(recent=64))
PYRAMIDKV = replace(SNAPKV, budgets=Pyramid())
ADAKV = replace(SNAPKV, heads=Adaptive())
KNORM = Policy(scorers.key_norm)
KEYDIFF = Policy(scorers.key_difference)
EXPECTED_ATTENTION = Policy(scorers.expected_attention, observe=None, protected=Protected(sinks=4))

POLICIES = {
    "streaming-llm": STREAMING_LLM,
    "h2o": H2O,
    "tova": TOVA,
    "snapkv": SNAPKV,
    "pyramidkv": PYRAMIDKV,
    "adakv": ADAKV,
    "knorm": KNORM,
    "keydiff": KEYDIFF,
    "expected-attention": EXPECTED_ATTENTION,
}
