"""Matrices as they are stored: eight bits with a scale per row, or four bits with a scale per group of a row.

Symmetric codes, float16 scales. Letters: N rows, M columns, G groups of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 64  # columns that share a scale in four bits
_TIGHTER = (1.0, 0.93, 0.86, 0.8, 0.74)  # shares of the scale that fits a group's largest value: clipping it can pay


def eight_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [N, M] -> codes int8 [N, M], scales [N, 1]."""
    scale = (values.abs().amax(1, keepdim=True) / 127).clamp(min=1e-7).half()
    return (values / scale.float()).round().clamp(-127, 127).to(torch.int8), scale


def four_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [N, M] -> codes uint8 [N, G * 32], two columns in each, the first in the low half; scales [N, G].

    The last group is filled up with zeros. A group's scale is the one of a few that errs least.
    """
    rows, columns = values.shape
    groups = torch.nn.functional.pad(values, (0, -columns % GROUP)).view(rows, -1, GROUP)
    largest = groups.abs().amax(-1, keepdim=True) / 7
    scales = torch.stack([(share * largest).clamp(min=1e-7).half() for share in _TIGHTER])  # [5, N, G, 1]
    codes = (groups / scales.float()).round().clamp(-8, 7)
    best = (codes * scales.float() - groups).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    scale = scales.gather(0, best)[0]
    chosen = (codes.gather(0, best.expand(1, *groups.shape))[0] + 8).to(torch.uint8).flatten(1)
    return chosen[:, 0::2] | chosen[:, 1::2] << 4, scale[..., 0]


def values_of(codes: Tensor, scale: Tensor, columns: int) -> Tensor:
    """What either kind stands for, float32 [N, columns]."""
    if codes.dtype == torch.int8:
        return codes.float() * scale.float()
    halves = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).float() - 8
    return (halves.view(*scale.shape, GROUP) * scale.float()[..., None]).flatten(1)[:, :columns].contiguous()
