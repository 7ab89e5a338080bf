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
_ROWS = (4, 2, 8)  # of a tile: r5-4, r3, r2-0
_INPUTS = (2, 2, 4, 2)  # of a step: k4, k3, k2-1, k0
_ORDER = (0, 4, 1, 3, 7, 5, 6, 8, 2)  # tile, step, r5-4, r2-0, k2-1, k4, k3, k0, r3


@dataclass(frozen=True, slots=True)
class Rounded:
    """codes int8 [N, K], scales float32 [N]. `fragments`: the codes lie in the order that `held.py` reads."""

    codes: Tensor
    scales: Tensor
    fragments: bool = False

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
        codes = _restored(self.codes) if self.fragments else self.codes
        return (codes.float() * self.scales[:, None]).to(dtype).t()

    def arranged(self) -> Rounded:
        """The same in fragment order. N in tiles of 64, K in steps of 32."""
        n, k = self.codes.shape
        codes = self.codes.reshape(n // 64, *_ROWS, k // 32, *_INPUTS).permute(_ORDER).reshape(n, k)
        return Rounded(codes, self.scales, True)


def _restored(codes: Tensor) -> Tensor:
    """The inverse of `Rounded.arranged`."""
    n, k = codes.shape
    unfolded = (n // 64, *_ROWS, k // 32, *_INPUTS)
    back = sorted(range(len(_ORDER)), key=_ORDER.__getitem__)
    return codes.view([unfolded[axis] for axis in _ORDER]).permute(back).reshape(n, k)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = weight.float()
    scales = wide.abs().amax(1) / LARGEST
    codes = (wide / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return codes.to(torch.int8), scales
