"""Parameters beside the attention projections, counted from a config.

`figures` says what is counted, `rules` how a family's parameters are put together from `parts`,
`tables` which family has which, and `count` counts.
"""

from kvjax.sizing.weights.figures import Experts, Weights, ffn_parameters
from kvjax.sizing.weights.precisions import WEIGHT_PRECISIONS, Precision, precision

__all__ = [
    "WEIGHT_PRECISIONS",
    "Experts",
    "Precision",
    "Weights",
    "ffn_parameters",
    "precision",
]
