"""Pooling of KV heads: the step that turns MHA weights into GQA or MQA weights.

Groups are contiguous: new head j replaces the heads [j*g, (j+1)*g) of a checkpoint with g times as
many, because query head n reads KV head n // G. Ainslie et al. 2023, "GQA: Training Generalized
Multi-Query Transformer Models from Multi-Head Checkpoints", section 2.1 and figure 4.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np

# A method maps grouped heads (..., J, g, H) to new heads (..., J, H) of the same dtype.
Method = Callable[[np.ndarray, np.random.Generator], np.ndarray]

_DTYPES = [np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)]


def pool_heads(
    x: np.ndarray, heads: int, new_heads: int, method: str, rng: np.random.Generator
) -> np.ndarray:
    """Pools the heads on the last axis of a K or V tensor into fewer.

    Serves kernels (D, heads * H), biases and full-width norms (heads * H,), and any other array
    with contiguous heads last.

    Args:
      x: (..., heads * H), bf16, f16, f32 or f64. A transposed view is pooled in its own memory
        order, without a copy.
      heads: number of KV heads in `x`.
      new_heads: number of KV heads to make; a divisor of `heads`.
      method: a key of `METHODS`.
      rng: source of randomness, used by "random" alone; see `tensor_rng`.

    Returns:
      (..., new_heads * H) in the dtype of `x` and a fresh array.

    Raises:
      ValueError: `new_heads`, `method`, the dtype or the width of `x` does not fit.
    """
    check_kv_heads(new_heads, heads)
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; accepted: {', '.join(METHODS)}")
    if x.dtype not in _DTYPES:
        accepted = ", ".join(map(str, _DTYPES))
        raise ValueError(f"heads of dtype {x.dtype} cannot be pooled; accepted: {accepted}")
    *lead, width = x.shape
    if width % heads:
        raise ValueError(f"a last axis of {width} is not a whole number of {heads} heads")
    groups = x.reshape(*lead, new_heads, heads // new_heads, width // heads)
    return METHODS[method](groups, rng).reshape(*lead, -1)


def check_kv_heads(new_heads: int, heads: int, field: str = "kv_heads") -> None:
    """Raises ValueError unless `heads` KV heads can be pooled into `new_heads`.

    Args:
      new_heads: the number asked for.
      heads: the number the checkpoint has.
      field: what the caller names `new_heads`, for the message.
    """
    if new_heads < 1 or heads % new_heads:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"{field}={new_heads} does not divide the checkpoint's {heads} KV heads;"
            f" accepted: {divisors}"
        )


def tensor_rng(seed: int, name: str) -> np.random.Generator:
    """A generator for one tensor, so that its values do not depend on the order of the tensors."""
    return np.random.default_rng([seed, *name.encode()])


def _mean(groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The mean of each group, summed in float64 and cast once.

    In float64 the sum of g equal values of at most 24 bits is exact, so that equal heads come back
    bit-identical; in float32 they do not for g = 3, 5, 6, 7, ...
    """
    pooled = np.empty_like(groups[..., 0, :])
    for j in range(pooled.shape[-2]):  # one head at a time keeps the float64 temporary small
        # From -0.0, which changes no sum: numpy starts at +0.0, which makes +0.0 of heads of -0.0.
        sums = groups[..., j, :, :].sum(axis=-2, dtype=np.float64, initial=-0.0)
        pooled[..., j, :] = sums / groups.shape[-2]
    return pooled


def _first(groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The first head of each group."""
    return groups[..., 0, :].copy(order="K")


def _random(groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Normal values with mean 0 and the standard deviation of the whole source tensor."""
    scale = _standard_deviation(groups)
    pooled = np.empty_like(groups[..., 0, :])
    for j in range(pooled.shape[-2]):
        pooled[..., j, :] = rng.normal(0.0, scale, pooled[..., j, :].shape)
    return pooled


def _standard_deviation(groups: np.ndarray) -> float:
    """The float64 standard deviation over all entries, with a temporary of one group."""
    center = groups.mean(dtype=np.float64)
    blocks = (groups[..., j, :, :] for j in range(groups.shape[-3]))
    squares = sum(np.square(np.subtract(b, center, dtype=np.float64)).sum() for b in blocks)
    return float(np.sqrt(squares / groups.size))


METHODS: dict[str, Method] = {"mean": _mean, "first": _first, "random": _random}
