"""Rotary position embedding: frequencies per scaling type. Tables and rotation are `forefetch.kernels.qkv`'s.

Sources: RoPE, arXiv 2104.09864; YaRN, arXiv 2309.00071; "linear" is position interpolation, arXiv 2306.15595; "llama3" as
published with Llama 3.1. Halves of the head dim are paired (i with i + D/2), as all supported checkpoints do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from forefetch.kernels.qkv import tables
from forefetch.spec import RopeSpec

Floats = npt.NDArray[np.float32]
FEWEST_ROWS, MOST_ROWS = 1024, 16_384
"""Positions whose cosines and sines `Rope.rows` keeps, from the one to the other as needed: 16 MiB at a head dim of 128."""


class Rope:
    """Cosines and sines for positions. Frequencies are float32 on `device`."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        base = 1.0 / spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # [D/2]
        frequencies, self.attention_factor = _scaled(spec, base, head_dim)
        self.frequencies = frequencies.to(device)
        self._rows: tuple[Floats, Floats] = np.zeros((0, head_dim), np.float32), np.zeros((0, head_dim), np.float32)

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] -> cos, sin [T, 1, D], both halves filled, ready to broadcast over heads."""
        return tables(positions, self.frequencies, self.attention_factor, dtype)

    def rows(self, positions: torch.Tensor) -> tuple[Floats, Floats]:
        """The same on a CPU as arrays [T, D], looked up: PyTorch computes even one row on several threads, and waits."""
        places = positions.numpy()
        needed = int(places.max(initial=0)) + 1
        if needed > MOST_ROWS:
            cos, sin = self.tables(positions, torch.float32)
            return cos[:, 0].numpy(), sin[:, 0].numpy()
        if needed > len(self._rows[0]):
            count = min(max(FEWEST_ROWS, 2 * needed), MOST_ROWS)
            cos, sin = self.tables(torch.arange(count), torch.float32)
            self._rows = cos[:, 0].numpy(), sin[:, 0].numpy()
        return self._rows[0][places], self._rows[1][places]


def _scaled(spec: RopeSpec, base: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, float]:
    """Frequencies [D/2] after scaling, and the factor on cos and sin."""
    if spec.kind == "linear":
        return base / spec.params["factor"], 1.0
    if spec.kind == "llama3":
        return _llama3(spec, base), 1.0
    if spec.kind == "yarn":
        return _yarn(spec, base, head_dim)
    return base, 1.0


def _llama3(spec: RopeSpec, base: torch.Tensor) -> torch.Tensor:
    """Long wavelengths divided by `factor`, short ones kept, a linear blend between."""
    factor, original = spec.params["factor"], spec.params["original_max_position_embeddings"]
    low, high = spec.params["low_freq_factor"], spec.params["high_freq_factor"]
    wavelength = 2 * math.pi / base
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * base / factor + blend * base
    result = torch.where(wavelength > original / low, base / factor, base)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, blended, result)


def _yarn(spec: RopeSpec, base: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, float]:
    """Dims that turn often keep their frequency, dims that turn rarely are interpolated, a ramp lies between."""
    p, factor = spec.params, spec.params["factor"]

    def dim_of(turns: float) -> float:
        original = p["original_max_position_embeddings"]
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dim_of(p.get("beta_fast", 32.0)), dim_of(p.get("beta_slow", 1.0))
    if p.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return base / factor * ramp + base * (1 - ramp), _yarn_attention_factor(p, factor)


def _yarn_attention_factor(params: Mapping[str, float], factor: float) -> float:
    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "attention_factor" in params:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return scale(params["mscale"]) / scale(params["mscale_all_dim"])
    return scale(1.0)
