"""Products of few rows with a matrix, block by block in registers; and matrices in the order in which these read them.

Addresses are integers, `ld` bytes between rows. Letters: K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import carray
from torch import Tensor

from forefetch.kernels.compiled.crew import ARGUMENTS, finish, join, post, shared, take
from forefetch.kernels.compiled.maths import assign
from forefetch.kernels.compiled.simd import LANES, PANEL, ROWS, VECTORS, address_of, blocks, floats_at, longs_at
from forefetch.kernels.compiled.toolchain import compiled, takes_ns

FLOAT32, BFLOAT16 = np.int64(0), np.int64(1)  # as numbers of one type, so that nothing is compiled for each value

PRODUCT = 0
"""Its kind as a crew's job; an item is a panel."""
_some, _some_16 = blocks(ROWS, VECTORS, False), blocks(ROWS, VECTORS, True)
_thin, _thin_16 = blocks(1, 1, False), blocks(1, 1, True)
AHEAD, AHEAD_ROWS = 2048, 4
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


@compiled()
def product(x, matrix, kind, buffer, order, outputs, bias, board):
    """buffer [T, N] = x [T, K] times a packed matrix, plus the bias at an address if that is not 0; N in whole panels."""
    rows, count = len(x), x.shape[1]
    panels = -(-outputs // PANEL)
    job = board[ARGUMENTS:]
    job[0], job[1], job[2], job[3], job[4] = address_of(x), count, address_of(order), rows, matrix
    job[5], job[6], job[7], job[8], job[9] = kind, address_of(buffer), 4 * buffer.shape[1], outputs, bias
    size = 2 if kind == BFLOAT16 else 4
    if shared(board, takes_ns(size * count * panels * PANEL, 2 * rows * count * panels * PANEL)):
        post(board, PRODUCT, panels)
        panel = take(board)
        while panel >= 0:
            product_panel(board, panel)
            finish(board)
            panel = take(board)
        join(board, panels)
    else:
        for panel in range(panels):
            product_panel(board, panel)


@compiled()
def product_panel(board, panel):
    """One panel of the product that is on the board."""
    job = board[ARGUMENTS:]
    panel_of(job[0], job[1], job[2], job[3], job[4], job[5], job[6], job[7], job[8], job[9], panel)


@compiled()
def product_alone(x, matrix, kind, buffer, order, outputs, bias):
    """`product` by the caller, whoever that is, without the board."""
    for panel in range(-(-outputs // PANEL)):
        to, ldo = address_of(buffer), 4 * buffer.shape[1]
        panel_of(address_of(x), x.shape[1], address_of(order), len(x), matrix, kind, to, ldo, outputs, bias, panel)


@compiled()
def panel_of(x, count, order, rows, matrix, kind, out, ldo, outputs, bias, panel):
    """One panel of a product of what lies at these addresses."""
    stride, to = (2 if kind == BFLOAT16 else 4) * PANEL, out + 4 * panel * PANEL
    real = min(PANEL, outputs - panel * PANEL) if bias else 0
    for row in range(rows):
        line = carray(floats_at(to + row * ldo), PANEL)
        line[real:] = 0
        if bias:
            assign(line[:real], carray(floats_at(bias + 4 * panel * PANEL), real))
    which = carray(longs_at(order), rows)
    panel_times(x, 4 * count, which, matrix + panel * count * stride, stride, kind, count, to, ldo)
