"""Mixtures of experts, and which layers have one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvjax.sizing.config import Count
from kvjax.sizing.weights.figures import Experts, Weights, ffn_parameters
from kvjax.sizing.weights.parts import Part, Site, Size, Switch, dense, if_number, or_zero

_DENSE = dense()

# Which layers have experts.
type Where = Callable[[Site], bool]

EXPERTS = Count("num_experts", also=("num_local_experts",))
LOCAL_EXPERTS = Count("num_local_experts", also=("num_experts",))
ROUTED_EXPERTS = Count("n_routed_experts", also=("num_local_experts", "num_experts"))


@dataclass(frozen=True)
class Moe:
    """Routed experts with a router, beside experts that every token passes; or a dense layer.

    Attributes:
        experts: E.
        width: inner width of a routed expert.
        per_token: k.
        shared: inner width of the shared experts, all together.
        shared_gate: whether a gate of D weighs the shared experts.
        shared_bias: whether the shared experts' matrices have biases.
        matrices: 3 for gated experts, 2 for plain ones.
        bias: whether experts and router have biases.
        scores: numbers that the router has beside its matrix, an expert.
        inner: what experts take and give where tokens are projected to it; D without it.
        where: which layers have experts.
        otherwise: what the other layers have.
    """

    experts: Size
    width: Size
    per_token: Size = "num_experts_per_tok"
    shared: Size = 0
    shared_gate: bool = False
    shared_bias: Switch = False
    matrices: int = 3
    bias: Switch = False
    scores: int = 0
    inner: str | None = None
    where: Where = lambda site: True
    otherwise: Part = _DENSE

    def __call__(self, site: Site) -> Weights:
        """The parameters of the layer."""
        if not self.where(site):
            return self.otherwise(site)
        count, width, d_model = site.size(self.experts), site.size(self.width), site.d_model
        inner = site.number(self.inner) if self.inner else 0
        bias = site.fields.flag(self.bias)
        each = ffn_parameters(inner or d_model, width, self.matrices)
        each += ((self.matrices - 1) * width + d_model) * bias
        shared = site.size(self.shared)
        router = count * (d_model + bias + self.scores)
        biases = ((self.matrices - 1) * shared + d_model) * site.fields.flag(self.shared_bias)
        return Weights(
            small=router + d_model * self.shared_gate + biases,
            shared=ffn_parameters(d_model, shared, self.matrices) + 2 * d_model * inner,
            experts=(Experts(count, site.size(self.per_token), each),),
        )


def times(count: Size, width: Size) -> Size:
    """The width of `count` experts of `width`."""
    return lambda site: site.size(count) * site.size(width)


def from_layer(name: str = "first_k_dense_replace", absent: int = 0) -> Where:
    """Layers from the one on that a field names."""
    return lambda site: site.index >= site.number(name, absent)


def mlp_types(otherwise: Where, sparse: str = "sparse") -> Where:
    """Layers that `mlp_layer_types` calls sparse; `otherwise` where the config lacks it."""

    def where(site: Site) -> bool:
        kinds = site.fields.names("mlp_layer_types", site.depth, (sparse, "dense"))
        return otherwise(site) if kinds is None else kinds[site.index] == sparse

    return where


def behind(count: int) -> Where:
    """Layers behind the first `count`, where `mlp_layer_types` does not say which."""
    return mlp_types(lambda site: site.index >= count)


def with_frequency(start: int = 0) -> Where:
    """From `first_k_dense_replace` on, each layer that `moe_layer_freq` divides or marks."""
    first = from_layer(absent=start)

    def where(site: Site) -> bool:
        if isinstance(site.fields.get("moe_layer_freq"), list):
            return first(site) and bool(site.item("moe_layer_freq"))
        return first(site) and site.index % max(site.number("moe_layer_freq", 1), 1) == 0

    return where


def every_step(site: Site) -> bool:
    """Each `decoder_sparse_step`-th layer that is not in `mlp_only_layers` (Qwen)."""
    step = max(site.number("decoder_sparse_step", 1), 1)
    dense_layers = site.items("mlp_only_layers") or []
    return (site.index + 1) % step == 0 and site.index not in dense_layers


SHARED_EXPERT = or_zero("shared_expert_intermediate_size")
QWEN_MOE = Moe(EXPERTS, "moe_intermediate_size", where=every_step)
DEEPSEEK_MOE = Moe(
    ROUTED_EXPERTS,
    "moe_intermediate_size",
    shared=times(if_number("n_shared_experts", 1), "moe_intermediate_size"),
    where=from_layer(absent=3),
)
MIXTRAL_MOE = Moe(LOCAL_EXPERTS, "intermediate_size")
