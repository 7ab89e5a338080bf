"""The order of codes in which a warp reads tensor-core operands (mma m16n8k16) with 16-byte loads and no shuffles.

A matrix [rows, inputs] is cut into tiles of 32 rows, a tile into steps of 128 inputs, a step into words of 32 bits: 512 of int4
(2 KiB), 1,024 of int8.
Bits are written x3 for bit 3 of x; r is the row in the tile, k the input.
- Word in a step, lowest bit first: r3 k3 k4 k5 r0 r1 r2 r4 k6. So lane (r & 7) * 4 + (k5 k4) owns 16 adjacent bytes.
- Nibble in a word: ((k >> 1) & 3) + 4 * (k & 1). It holds q + 8.
- int8 has k2 below k6 in the word's number, and byte ((k >> 1) & 1) + 2 * (k & 1) holds q + 128.
- Scales, tile by tile and step by step, lowest bit first: r3 r4 [k6, in groups of 64] r0 r1 r2.
w13's rows are paired first: rows 0-15 of tile t are gate rows 16t.. and rows 16-31 up rows 16t.., so that one warp has both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# r4 r3 (r2 r1 r0) step k6 (k5 k4) k3 k2 k1 k0, as sizes of the axes that a tile's rows and inputs unfold into.
_ROWS = (2, 2, 8)
_INPUTS = (2, 4, 2, 2, 2, 2)
# From [tile, r4, r3, r210, step, k6, k54, k3, k2, k1, k0] to words with their codes, highest first: k0 k2 k1, or k0 k1.
_WORDS = {4: (0, 4, 5, 1, 3, 6, 7, 2, 10, 8, 9), 8: (0, 4, 5, 8, 1, 3, 6, 7, 2, 10, 9)}
_SCALES = (0, 4, 3, 5, 1, 2)  # from [tile, r4, r3, r210, step, sub]


def arrange(codes: Tensor, scales: Tensor, group: int, bits: int, paired: bool) -> tuple[Tensor, Tensor]:
    """codes int8 [rows, inputs] of `bits`, scales float16 [rows, inputs / group] -> uint8 and float16 in the order above."""
    rows, inputs = codes.shape
    unsigned = (codes.to(torch.int16) + (1 << bits - 1)).to(torch.uint8)
    ordered = _tiles(unsigned, paired).reshape(rows // 32, *_ROWS, inputs // 128, *_INPUTS).permute(_WORDS[bits]).reshape(-1)
    if bits == 4:
        ordered = ordered[::2] | (ordered[1::2] << 4)
    tiled = _tiles(scales, paired).reshape(rows // 32, *_ROWS, inputs // 128, 128 // group).permute(_SCALES)
    return ordered, tiled.reshape(-1)


def restore(codes: Tensor, scales: Tensor, shape: Sequence[int], group: int, bits: int, paired: bool) -> tuple[Tensor, Tensor]:
    """The inverse of `arrange`: codes int8 of `shape` [rows, inputs], scales float16 [rows, inputs / group]."""
    rows, inputs = shape
    unfolded: tuple[int, ...] = (rows // 32, *_ROWS, inputs // 128, *_INPUTS)
    single = torch.stack([codes & 15, codes >> 4], 1) if bits == 4 else codes
    signed = (single.to(torch.int16) - (1 << bits - 1)).to(torch.int8)
    order = _WORDS[bits]
    whole = signed.view([unfolded[axis] for axis in order]).permute(_inverse(order)).reshape(rows, inputs)
    unfolded = (rows // 32, *_ROWS, inputs // 128, 128 // group)
    tiled = scales.view([unfolded[axis] for axis in _SCALES]).permute(_inverse(_SCALES)).reshape(rows, inputs // group)
    return _untiled(whole, paired), _untiled(tiled, paired)


def _inverse(order: tuple[int, ...]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _tiles(matrix: Tensor, paired: bool) -> Tensor:
    """Gate and up rows in turns of 16."""
    return matrix.reshape(2, -1, 16, matrix.shape[1]).transpose(0, 1).reshape(matrix.shape) if paired else matrix


def _untiled(matrix: Tensor, paired: bool) -> Tensor:
    return matrix.reshape(-1, 2, 16, matrix.shape[1]).transpose(0, 1).reshape(matrix.shape) if paired else matrix
