"""A matrix in 8 bits: a code in -127..127 for every weight, and a scale for every output.

Rounding to the nearest code of a row whose largest weight is 127 codes; zero stays zero. A code is exact in every type that
products are made in, and a scale belongs to a whole output, so that a product is that of the codes, times the scales. Letters
as in the package; the matrix is [K, N] to those who multiply by it, and lies in memory as [N, K], as checkpoints do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 127


@dataclass(frozen=True, slots=True)
class Rounded:
    """codes int8 [N, K], scales float32 [N]."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def of(*weights: Tensor) -> Rounded:
        """[n, K] each, stacked over n."""
        parts = [_rounded(weight) for weight in weights]
        codes, scales = zip(*parts, strict=True)
        return Rounded(torch.cat(codes), torch.cat(scales))

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.codes.shape[1], self.codes.shape[0]

    def __len__(self) -> int:
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Of memory."""
        return self.codes.nbytes + self.scales.nbytes

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[K, N], each weight rounded to `dtype` once more."""
        return (self.codes.float() * self.scales[:, None]).to(dtype).t()


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = weight.float()
    scales = wide.abs().amax(1) / LARGEST
    codes = (wide / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return codes.to(torch.int8), scales
