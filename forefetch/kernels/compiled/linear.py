"""Products of few rows with a matrix, block by block in registers; and matrices in the order in which these read them.

Addresses are integers, `ld` bytes between rows. Letters: K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import carray, prange
from torch import Tensor

from forefetch.kernels.compiled.simd import LANES, PANEL, ROWS, VECTORS, address_of, blocks, floats_at
from forefetch.kernels.compiled.toolchain import compiled, worth_splitting

FLOAT32, BFLOAT16 = np.int64(0), np.int64(1)  # as numbers of one type, so that nothing is compiled for each value

_some, _some_16 = blocks(ROWS, VECTORS, False), blocks(ROWS, VECTORS, True)
_thin, _thin_16 = blocks(1, 1, False), blocks(1, 1, True)
AHEAD, AHEAD_ROWS = 4096, 8
"""How far ahead of reading weights are asked for: so many bytes, but so many rows at least."""


@dataclass(frozen=True)
class Packed:
    """A matrix [K, N] as panels of PANEL columns, each [K, PANEL], the last one filled up with zeros.

    kind BFLOAT16 where every value is one: half the bytes to read, and the same numbers.
    """

    memory: Tensor
    kind: np.int64
    inputs: int
    outputs: int

    @staticmethod
    def of(matrix: Tensor) -> Packed:
        """matrix [K, N] of any float type."""
        inputs, outputs = matrix.shape
        matrix = matrix.float()
        narrow = matrix.bfloat16()
        kind = BFLOAT16 if torch.equal(narrow.float(), matrix) else FLOAT32
        whole = torch.zeros(inputs, padded(outputs), dtype=torch.bfloat16 if kind else torch.float32)
        whole[:, :outputs] = narrow if kind else matrix
        return Packed(whole.view(inputs, -1, PANEL).transpose(0, 1).contiguous(), kind, inputs, outputs)


def padded(columns: int) -> int:
    """Columns of whole panels."""
    return -(-columns // PANEL) * PANEL


@compiled()
def panel_times(x, ldx, rows, w, ldw, kind, count, out, ldo):
    """out[i][:PANEL] += x[rows[i]][:count] @ w[:count][:PANEL]."""
    at, total, which, ahead = 0, len(rows), address_of(rows), max(AHEAD, AHEAD_ROWS * ldw)
    while at < total:
        left = total - at
        size = -(-left // -(-left // ROWS))  # blocks of nearly the same size: five rows and four, not six and three
        if kind == BFLOAT16:
            _some_16(size, x, ldx, which + 8 * at, w, ldw, count, out + at * ldo, ldo, ahead)
        else:
            _some(size, x, ldx, which + 8 * at, w, ldw, count, out + at * ldo, ldo, ahead)
        at += size


@compiled()
def edge_times(x, ldx, rows, w, ldw, kind, count, columns, out, ldo):
    """The same for fewer columns than a panel's: vector by vector, then number by number."""
    size = 2 if kind == BFLOAT16 else 4
    for at in range(len(rows)):
        which, column = address_of(rows) + 8 * at, 0
        while column + LANES <= columns:
            o = out + at * ldo + 4 * column
            if kind == BFLOAT16:
                _thin_16(1, x, ldx, which, w + 2 * column, ldw, count, o, ldo, ldw)
            else:
                _thin(1, x, ldx, which, w + 4 * column, ldw, count, o, ldo, ldw)
            column += LANES
        values, sums = carray(floats_at(x + rows[at] * ldx), count), carray(floats_at(out + at * ldo), columns)
        while column < columns:
            total = sums[column]
            for k in range(count):
                total += values[k] * number_at(w + k * ldw + size * column, kind)
            sums[column] = total
            column += 1


@compiled()
def number_at(address, kind):
    """A float32, or a bfloat16 as one."""
    if kind == FLOAT32:
        return carray(floats_at(address), 1)[0]
    halves = carray(floats_at(address & ~3), 1).view(np.uint32)[0]
    bits = np.empty(1, np.uint32)
    bits[0] = (halves & np.uint32(0xFFFF0000)) if address & 2 else (halves << np.uint32(16))
    return bits.view(np.float32)[0]


@compiled()
def matrix_times(x, ldx, rows, w, ldw, kind, count, columns, out, ldo):
    """out[i][:columns] += x[rows[i]][:count] @ w[:count][:columns], w row after row."""
    size, column = 2 if kind == BFLOAT16 else 4, 0
    while column + PANEL <= columns:
        panel_times(x, ldx, rows, w + size * column, ldw, kind, count, out + 4 * column, ldo)
        column += PANEL
    if column < columns:
        edge_times(x, ldx, rows, w + size * column, ldw, kind, count, columns - column, out + 4 * column, ldo)


@compiled(parallel=True)
def _split(x, ldx, rows, w, kind, count, panels, out, ldo):
    stride = (2 if kind == BFLOAT16 else 4) * PANEL
    for index in prange(panels):
        panel = np.int64(index)  # an unsigned one would compile everything below again
        panel_times(x, ldx, rows, w + panel * count * stride, stride, kind, count, out + 4 * panel * PANEL, ldo)


@compiled()
def panels_times(x, ldx, rows, w, kind, count, panels, out, ldo, threads):
    """out[i] += x[rows[i]] @ w for a packed w; out has room for whole panels."""
    stride = (2 if kind == BFLOAT16 else 4) * PANEL
    if threads > 1 and worth_splitting(count * panels * stride, 2 * len(rows) * count * panels * PANEL):
        _split(x, ldx, rows, w, kind, count, panels, out, ldo)
    else:
        for panel in range(panels):
            panel_times(x, ldx, rows, w + panel * count * stride, stride, kind, count, out + 4 * panel * PANEL, ldo)
