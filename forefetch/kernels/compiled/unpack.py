"""An expert from host memory into a slot, whose layout is that of `kernels/grouped_mlp/formats.py` in natural order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, types

from forefetch.kernels.compiled.maths import assign
from forefetch.kernels.compiled.simd import copy_lines, floats_at, intrinsic
from forefetch.kernels.compiled.toolchain import compiled, entry

SAME, HALF, INT8, INT4 = range(4)
"""The same bytes; float16 into float32; codes with scales into float32."""


class Copies(NamedTuple):
    """From where to where."""

    host: int  # address of expert 0
    host_stride: int
    pool: int  # address of slot 0
    stride: int
    kind: int
    hidden: int
    width: int
    group13: int  # inputs that share a scale in w13 [H, 2I]
    group2: int  # in w2 [I, H]


def _pointer(element: types.Type, kind: ir.Type):
    @intrinsic
    def at(context, address):
        def generate(ctx, b, signature, arguments):
            return b.inttoptr(arguments[0], kind.as_pointer())

        return types.CPointer(element)(types.intp), generate

    return at


_bytes_at = _pointer(types.int8, ir.IntType(8))
_halves_at = _pointer(types.uint16, ir.IntType(16))


@intrinsic
def _as_float(context, bits):
    """The float32 of these bits."""

    def generate(ctx, b, signature, arguments):
        return b.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


_FROM_HALF = np.float32(2.0**112)  # between the biases of the two exponents


@compiled(fastmath=False)
def widened(half):
    """The float32 of a float16's bits, subnormal ones, infinities and NaN included."""
    bits = np.uint32(half)
    body, sign = (bits & np.uint32(0x7FFF)) << np.uint32(13), (bits & np.uint32(0x8000)) << np.uint32(16)
    special = body | np.uint32(0x7F800000) if body >= np.uint32(0x0F800000) else np.uint32(0)
    value = _as_float(body) * _FROM_HALF
    return _as_float(special | sign) if special else (-value if sign else value)


@compiled(fastmath=False)
def fill(copies, number, slot):
    """Expert `number` into `slot`: bit for bit what `formats.unpack` gives."""
    fill_at(copies, number, copies.pool + slot * copies.stride)


@compiled(fastmath=False)
def fill_at(copies, number, to):
    """The same, to an address."""
    source = copies.host + number * copies.host_stride
    hidden, width = copies.hidden, copies.width
    elements = 3 * hidden * width
    if copies.kind == SAME:
        lines, words = copies.stride // 64, copies.stride // 4
        copy_lines(source, to, lines)
        assign(carray(floats_at(to), words)[16 * lines :], carray(floats_at(source), words)[16 * lines :])
        return
    if copies.kind == HALF:
        halves, out = carray(_halves_at(source), elements), carray(floats_at(to), elements)
        for i in range(elements):
            out[i] = widened(halves[i])
        return
    each = 2 if copies.kind == INT4 else 1  # codes of a byte
    first, second = 2 * hidden * width, hidden * width
    codes2 = source + first // each
    scales13 = codes2 + second // each
    scales2 = scales13 + 2 * (first // copies.group13)
    if copies.kind == INT4:
        _int4(source, scales13, hidden, 2 * width, copies.group13, to)
        _int4(codes2, scales2, width, hidden, copies.group2, to + 4 * first)
    else:
        _int8(source, scales13, hidden, 2 * width, copies.group13, to)
        _int8(codes2, scales2, width, hidden, copies.group2, to + 4 * first)


fill_call = entry(fill)


@compiled(fastmath=False)
def _int8(codes, scales, inputs, rows, group, to):
    """codes [inputs, rows] times scales [inputs / group, rows]."""
    line = np.empty(rows, np.float32)
    for block in range(inputs // group):
        _scales(scales + 2 * block * rows, line)
        for i in range(block * group, (block + 1) * group):
            values, out = carray(_bytes_at(codes + i * rows), rows), carray(floats_at(to + 4 * i * rows), rows)
            for j in range(rows):
                out[j] = np.float32(values[j]) * line[j]


@compiled(fastmath=False)
def _int4(codes, scales, inputs, rows, group, to):
    """The same for codes [inputs / group, group / 2, rows] of two inputs each: of the group's first half, then its second."""
    line, half = np.empty(rows, np.float32), group // 2
    for block in range(inputs // group):
        _scales(scales + 2 * block * rows, line)
        for i in range(half):
            values = carray(_bytes_at(codes + (block * half + i) * rows), rows)
            low = carray(floats_at(to + 4 * (block * group + i) * rows), rows)
            high = carray(floats_at(to + 4 * (block * group + half + i) * rows), rows)
            for j in range(rows):
                low[j] = np.float32(np.int8(values[j] << 4) >> 4) * line[j]
                high[j] = np.float32(values[j] >> 4) * line[j]


@compiled(fastmath=False)
def _scales(address, line):
    halves = carray(_halves_at(address), len(line))
    for j in range(len(line)):
        line[j] = widened(halves[j])
