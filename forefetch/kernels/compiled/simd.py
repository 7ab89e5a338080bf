"""Blocks of arithmetic that stay in vector registers, written as LLVM IR through Numba's intrinsics.

LLVM vectorises plain loops well, but keeps no block of sums in registers across them. So the two innermost loops of this
package are spelled out, everything around them is ordinary Numba. Addresses are plain integers; nothing here checks any.

A sum is formed in one order, whatever block its row is in: a row's result has the same bits beside any other rows.
"""

from __future__ import annotations

import time
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _numba_intrinsic

intrinsic: Any = _numba_intrinsic
_FEATURES = llvm.get_host_cpu_features()
LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx2") else 4
"""float32 numbers of a vector register."""
ROWS = 2 if _FEATURES.get("avx2") and LANES == 8 else 4
"""Most rows of a block: 4 x 4 sums need 32 registers, which AVX2 does not have."""
VECTORS = 4
"""Vectors of a block's columns."""
PANEL = LANES * VECTORS
"""Columns of a full block."""

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS, _SHORTS = (ir.VectorType(kind, LANES) for kind in (_F32, _I32, _I16))
_CLOCK = getattr(time, "CLOCK_UPTIME_RAW", getattr(time, "CLOCK_MONOTONIC", 1))  # the one of perf_counter_ns


def block(rows: int, vectors: int, bfloat16: bool) -> Any:
    """(xs, w, ldw, count, outs): outs[r][:] += sum over k < count of xs[r][k] * w[k][:], `vectors` registers wide.

    xs, outs: tuples of `rows` addresses of float32; w: address of the first row, ldw: bytes between rows, of float32 or
    bfloat16, which is widened: no value changes.
    """

    @intrinsic
    def multiply(context, xs, w, ldw, count, outs):
        addresses = types.UniTuple(types.intp, rows)

        def generate(ctx, b, signature, arguments):
            xs, w, ldw, count, outs = arguments
            x = [b.inttoptr(b.extract_value(xs, r), _F32.as_pointer()) for r in range(rows)]
            places = [[_vector(b, b.extract_value(outs, r), c * LANES * 4) for c in range(vectors)] for r in range(rows)]
            sums = [[cgutils.alloca_once_value(b, _load(b, place, 4)) for place in row] for row in places]
            with cgutils.for_range(b, count, intp=_I64) as loop:
                at = b.add(w, b.mul(loop.index, ldw))
                weights = [_weight(b, at, c, bfloat16) for c in range(vectors)]
                for r in range(rows):
                    value = _spread(b, b.load(b.gep(x[r], [loop.index])))
                    for weight, total in zip(weights, sums[r], strict=True):
                        b.store(_fma(b, value, weight, b.load(total)), total)
            for row, totals in zip(places, sums, strict=True):
                for place, total in zip(row, totals, strict=True):
                    b.store(b.load(total), place).align = 4
            return ctx.get_dummy_value()

        return types.void(addresses, types.intp, types.intp, types.intp, addresses), generate

    return multiply


def dots(rows: int, keys: int) -> Any:
    """(qs, k, ldk, count, outs): outs[r][j] = sum over d < count of qs[r][d] * k[j][d], for j < `keys`; count in vectors.

    qs, outs: tuples of `rows` addresses of float32; k: address of the first key, ldk: bytes between keys.
    """

    @intrinsic
    def multiply(context, qs, k, ldk, count, outs):
        addresses = types.UniTuple(types.intp, rows)

        def generate(ctx, b, signature, arguments):
            qs, k, ldk, count, outs = arguments
            zero = ir.Constant(_FLOATS, [0.0] * LANES)
            sums = [[cgutils.alloca_once_value(b, zero) for _ in range(keys)] for _ in range(rows)]
            with cgutils.for_range(b, count, intp=_I64) as loop:
                at = b.mul(loop.index, ir.Constant(_I64, LANES * 4))
                queries = [_load(b, _vector(b, b.add(b.extract_value(qs, r), at), 0), 4) for r in range(rows)]
                for j in range(keys):
                    key = _load(b, _vector(b, b.add(b.add(k, b.mul(ldk, ir.Constant(_I64, j))), at), 0), 4)
                    for query, totals in zip(queries, sums, strict=True):
                        b.store(_fma(b, query, key, b.load(totals[j])), totals[j])
            for r, totals in enumerate(sums):
                for j, total in enumerate(totals):
                    place = b.add(b.extract_value(outs, r), ir.Constant(_I64, 4 * j))
                    b.store(_added(b, b.load(total)), b.inttoptr(place, _F32.as_pointer()))
            return ctx.get_dummy_value()

        return types.void(addresses, types.intp, types.intp, types.intp, addresses), generate

    return multiply


@intrinsic
def power_of_two(context, exponent):
    """2 ** exponent as float32, for an int32 of -126 to 127."""

    def generate(ctx, b, signature, arguments):
        return b.bitcast(b.shl(b.add(arguments[0], ir.Constant(_I32, 127)), ir.Constant(_I32, 23)), _F32)

    return types.float32(types.int32), generate


@intrinsic
def floats_at(context, address):
    """The address as a pointer to float32, for `numba.carray`."""

    def generate(ctx, b, signature, arguments):
        return b.inttoptr(arguments[0], _F32.as_pointer())

    return types.CPointer(types.float32)(types.intp), generate


@intrinsic
def address_of(context, array):
    """Of an array's first element, as the signed integer that all addresses are here."""

    def generate(ctx, b, signature, arguments):
        made = ctx.make_array(signature.args[0])(ctx, b, arguments[0])
        return b.ptrtoint(made.data, _I64)

    return types.intp(array), generate


@intrinsic
def clock_ns(context):
    """time.perf_counter_ns."""

    def generate(ctx, b, signature, arguments):
        span = cgutils.alloca_once(b, ir.ArrayType(_I64, 2))
        kind = ir.FunctionType(_I32, [_I32, span.type])
        b.call(cgutils.get_or_insert_function(b.module, kind, "clock_gettime"), [ir.Constant(_I32, _CLOCK), span])
        seconds, ns = (b.load(cgutils.gep_inbounds(b, span, 0, i)) for i in range(2))
        return b.add(b.mul(seconds, ir.Constant(_I64, 1_000_000_000)), ns)

    return types.int64(), generate


def _vector(b: ir.IRBuilder, address: ir.Value, offset: int) -> ir.Value:
    return b.inttoptr(b.add(address, ir.Constant(_I64, offset)), _FLOATS.as_pointer())


def _load(b: ir.IRBuilder, place: ir.Value, align: int) -> ir.Value:
    value = b.load(place)
    value.align = align
    return value


def _weight(b: ir.IRBuilder, address: ir.Value, vector: int, bfloat16: bool) -> ir.Value:
    """A vector of a row; bfloat16 is the upper half of a float32."""
    if not bfloat16:
        return _load(b, _vector(b, address, vector * LANES * 4), 4)
    place = b.inttoptr(b.add(address, ir.Constant(_I64, vector * LANES * 2)), _SHORTS.as_pointer())
    bits = b.shl(b.zext(_load(b, place, 2), _INTS), ir.Constant(_INTS, [16] * LANES))
    return b.bitcast(bits, _FLOATS)


def _spread(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    one = b.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INTS, [0] * LANES))


def _fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fmuladd.v{LANES}f32"), [x, y, z])


def _added(b: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """The sum of a vector's numbers, halves first."""
    width = LANES
    while width > 1:
        width //= 2
        order = [(i + width) if i < width else i for i in range(LANES)]
        other = b.shuffle_vector(vector, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INTS, order))
        vector = b.fadd(vector, other)
    return b.extract_element(vector, ir.Constant(_I32, 0))
