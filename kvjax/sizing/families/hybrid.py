"""Families of which some or all layers keep a state, beside their records or in their place."""

from collections.abc import Mapping

from kvjax.sizing.families import indexed_hybrids, linear, short_convolution, state_space
from kvjax.sizing.families.family import Reader

FAMILIES: Mapping[str, Reader] = {
    **state_space.FAMILIES,
    **linear.FAMILIES,
    **short_convolution.FAMILIES,
    **indexed_hybrids.FAMILIES,
}
