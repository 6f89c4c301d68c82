"""Rotary position embedding (RoPE), with the scalings that published checkpoints use.

Channels are paired as (i, i + dim/2), the "rotate half" convention of Hugging Face's checkpoints.
Sources: RoPE, arXiv:2104.09864; YaRN, arXiv:2309.00071; the llama3 rule, Llama 3.1's model card.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (arXiv:2306.15595): every frequency divided by `factor`."""

    factor: float
    magnitude: float = 1.0

    def frequencies(self, inv_freq: np.ndarray, rope: Rope) -> np.ndarray:
        return inv_freq / np.float32(self.factor)


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between the two."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int
    magnitude: float = 1.0

    def frequencies(self, inv_freq: np.ndarray, rope: Rope) -> np.ndarray:
        turns = self.original_max_positions * inv_freq / (2 * math.pi)
        ramp = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(ramp, 0, 1).astype(np.float32)
        return (1 - keep) * inv_freq / np.float32(self.factor) + keep * inv_freq


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: frequencies interpolated by a ramp over the number of turns (section 3.2 of the paper).

    `magnitude` multiplies cos and sin, that is, q and k each (the paper's temperature, its 3.4).
    """

    factor: float
    original_max_positions: int
    magnitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def frequencies(self, inv_freq: np.ndarray, rope: Rope) -> np.ndarray:
        def pair_with_turns(turns: float) -> float:
            wavelength = self.original_max_positions / (turns * 2 * math.pi)
            return rope.dim * math.log(wavelength) / (2 * math.log(rope.theta))

        low, high = pair_with_turns(self.beta_fast), pair_with_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.dim - 1)
        pairs = np.arange(rope.dim // 2, dtype=np.float32)
        # Where the range is empty or reversed, this is what the checkpoints' own code computes.
        keep = 1 - np.clip((pairs - low) / (high - low or 0.001), 0, 1).astype(np.float32)
        return inv_freq / np.float32(self.factor) * (1 - keep) + inv_freq * keep


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): each frequency divided by a factor of its own, (dim/2,)."""

    factors: tuple[float, ...]
    magnitude: float = 1.0

    def frequencies(self, inv_freq: np.ndarray, rope: Rope) -> np.ndarray:
        if len(self.factors) != len(inv_freq):
            raise ValueError(
                f"factors: got {len(self.factors)}; accepted: {len(inv_freq)}, one for each pair "
                f"of channels"
            )
        return inv_freq / np.array(self.factors, np.float32)


type Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True)
class Rope:
    """Rotates the first channels of each head; the others pass unchanged (partial rotary).

    Attributes:
      dim: channels that are rotated, where `pairs` are not named; the frequencies are spaced over
        it either way.
      theta: base of the frequencies.
      scaling: what changes them for longer texts.
      pairs: of each channel pair that is rotated, which of the dim/2 frequencies it has; None for
        all of them in order. Some may be left out or come more than once, as in keys made of
        several heads' channels.
    """

    dim: int
    theta: float = 10000.0
    scaling: Scaling | None = None
    pairs: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for pair in self.pairs or ():
            if not 0 <= pair < self.dim // 2:
                raise ValueError(f"pairs: got {pair}; accepted: 0 to {self.dim // 2 - 1}")

    @property
    def width(self) -> int:
        """Channels of each head that are rotated."""
        return self.dim if self.pairs is None else 2 * len(self.pairs)

    def frequencies(self) -> np.ndarray:
        """Radians per position of each channel pair, (width/2,) float32."""
        # Rounded to float32 where the reference implementations do: at large positions that is
        # visible in the angle, and checkpoints were trained with it. numpy's own float32 power is
        # off in the last bit where theirs is not.
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        powers = np.power(self.theta, exponents, dtype=np.float64).astype(np.float32)
        inv_freq = np.float32(1) / powers
        if self.scaling is not None:
            inv_freq = self.scaling.frequencies(inv_freq, self)
        return inv_freq if self.pairs is None else inv_freq[np.array(self.pairs, int)]

    def __call__(self, x: Array, positions: Array) -> Array:
        """Rotate x (B, T, N, H) to its absolute positions (B, T); padding (-1) is left at 0."""
        # (B, T, 1, width/2)
        angles = jnp.maximum(positions, 0)[..., None, None] * self.frequencies()
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        cos, sin = jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude
        low, high, rest = jnp.split(x, [self.width // 2, self.width], axis=-1)
        # cos and sin are float32, so the products are too; one cast at the end.
        rotated = [low * cos - high * sin, high * cos + low * sin]
        return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), rest], axis=-1)
