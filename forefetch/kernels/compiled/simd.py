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
ROWS = 6 if LANES == 16 else 2 if LANES == 8 else 4
"""Most rows of a block: 6 x 4 sums, 4 weights and a factor fit into AVX-512's 32 registers, 2 x 4 into the 16 of AVX2."""
VECTORS = 4
"""Vectors of a block's columns."""
PANEL = LANES * VECTORS
"""Columns of a full block."""

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS, _SHORTS = (ir.VectorType(kind, LANES) for kind in (_F32, _I32, _I16))
_NEAR = 3  # prefetches go to the first cache
_LINE = 64
READ_AHEAD, WRITE_AHEAD = 2048, 1024
"""Bytes; of copies."""
_CLOCK = getattr(time, "CLOCK_UPTIME_RAW", getattr(time, "CLOCK_MONOTONIC", 1))  # the one of perf_counter_ns


def blocks(most: int, vectors: int, bfloat16: bool) -> Any:
    """(rows, x, ldx, which, w, ldw, count, out, ldo, ahead): out[r][:] += sum over k < count of x[which[r]][k] * w[k][:].

    For r < rows <= `most`; w and out are `vectors` registers wide. x, w, out: addresses; which: address of int64 numbers; ld:
    bytes between rows. x and out are float32, w is that or bfloat16, which is widened: no value changes. What is read of w
    is asked for `ahead` bytes before, wherever that is: asking is harmless.
    """

    @intrinsic
    def multiply(context, rows, x, ldx, which, w, ldw, count, out, ldo, ahead):
        def generate(ctx, b, signature, arguments):
            done = b.append_basic_block("done")
            choice = b.switch(arguments[0], done)
            for number in range(1, most + 1):
                case = b.append_basic_block(f"rows{number}")
                choice.add_case(ir.Constant(_I64, number), case)
                b.position_at_end(case)
                _multiply(b, number, vectors, bfloat16, arguments[1:])
                b.branch(done)
            b.position_at_end(done)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return multiply


def _multiply(b: ir.IRBuilder, rows: int, vectors: int, bfloat16: bool, arguments: Any) -> None:
    """One block of `blocks`."""
    x, ldx, which, w, ldw, count, out, ldo, ahead = arguments
    numbers = [b.load(b.gep(b.inttoptr(which, _I64.as_pointer()), [ir.Constant(_I64, r)])) for r in range(rows)]
    factors = [b.inttoptr(b.add(x, b.mul(number, ldx)), _F32.as_pointer()) for number in numbers]
    lines = [b.add(out, b.mul(ldo, ir.Constant(_I64, r))) for r in range(rows)]
    places = [[_vector(b, line, c * LANES * 4) for c in range(vectors)] for line in lines]
    sums = []
    for row in places:
        begun = [_load(b, place, 4) for place in row]
        sums.append([cgutils.alloca_once_value(b, value) for value in (_parted(b, begun) if bfloat16 else begun)])
    with cgutils.for_range(b, count, intp=_I64) as loop:
        at = b.add(w, b.mul(loop.index, ldw))
        for line in range(0, vectors * LANES * (2 if bfloat16 else 4), 64):
            _prefetch(b, b.add(at, b.add(ahead, ir.Constant(_I64, line))))
        weights = _weights(b, at, vectors, bfloat16)
        for factor, totals in zip(factors, sums, strict=True):
            value = _spread(b, b.load(b.gep(factor, [loop.index])))
            for weight, total in zip(weights, totals, strict=True):
                b.store(_fma(b, value, weight, b.load(total)), total)
    for row, totals in zip(places, sums, strict=True):
        ended = [b.load(total) for total in totals]
        for place, value in zip(row, _joined(b, ended) if bfloat16 else ended, strict=True):
            b.store(value, place).align = 4


def dots(rows: int, keys: int, ahead: int = 8) -> Any:
    """(qs, k, ldk, count, outs): outs[r][j] = sum over d < count of qs[r][d] * k[j][d], for j < `keys`; count in vectors.

    qs, outs: tuples of `rows` addresses of float32; k: address of the first key, ldk: bytes between keys. Keys are asked for
    `ahead` before they are read.
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
                    _prefetch(b, b.add(b.add(k, b.mul(ldk, ir.Constant(_I64, j + ahead))), at))
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
def longs_at(context, address):
    """The address as a pointer to int64, for `numba.carray`."""

    def generate(ctx, b, signature, arguments):
        return b.inttoptr(arguments[0], _I64.as_pointer())

    return types.CPointer(types.int64)(types.intp), generate


@intrinsic
def address_of(context, array):
    """Of an array's first element, as the signed integer that all addresses are here."""

    def generate(ctx, b, signature, arguments):
        made = ctx.make_array(signature.args[0])(ctx, b, arguments[0])
        return b.ptrtoint(made.data, _I64)

    return types.intp(array), generate


@intrinsic
def copy_lines(context, source, to, lines):
    """Copies so many lines of 64 bytes between addresses. What is read and what is written is asked for ahead of it."""

    def generate(ctx, b, signature, arguments):
        source, to, lines = arguments
        with cgutils.for_range(b, lines, intp=_I64) as loop:
            at = b.mul(loop.index, ir.Constant(_I64, _LINE))
            begin, end = b.add(source, at), b.add(to, at)
            _prefetch(b, b.add(begin, ir.Constant(_I64, READ_AHEAD)))
            _prefetch(b, b.add(end, ir.Constant(_I64, WRITE_AHEAD)), written=True)
            for part in range(0, _LINE, LANES * 4):
                b.store(_load(b, _vector(b, begin, part), 4), _vector(b, end, part)).align = 4
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


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


def _weights(b: ir.IRBuilder, address: ir.Value, vectors: int, bfloat16: bool) -> list[ir.Value]:
    """The vectors of a row, bfloat16 in the order of `_parted`.

    A bfloat16 is the upper half of a float32, so a register of them is two of float32 at one instruction each: every second
    number where it is, and those between shifted up.
    """
    if not bfloat16:
        return [_load(b, _vector(b, address, c * LANES * 4), 4) for c in range(vectors)]
    found = []
    for c in range(0, vectors - 1, 2):
        place = b.inttoptr(b.add(address, ir.Constant(_I64, c * LANES * 2)), _INTS.as_pointer())
        both = _load(b, place, 2)
        even, odd = b.shl(both, ir.Constant(_INTS, [16] * LANES)), b.and_(both, ir.Constant(_INTS, [0xFFFF0000] * LANES))
        found += [b.bitcast(even, _FLOATS), b.bitcast(odd, _FLOATS)]
    if vectors % 2:
        place = b.inttoptr(b.add(address, ir.Constant(_I64, (vectors - 1) * LANES * 2)), _SHORTS.as_pointer())
        bits = b.shl(b.zext(_load(b, place, 2), _INTS), ir.Constant(_INTS, [16] * LANES))
        found.append(b.bitcast(bits, _FLOATS))
    return found


def _parted(b: ir.IRBuilder, vectors: list[ir.Value]) -> list[ir.Value]:
    """Each two vectors: first their numbers at even places, then those at odd ones."""
    return _shuffled(b, vectors, list(range(0, 2 * LANES, 2)), list(range(1, 2 * LANES, 2)))


def _joined(b: ir.IRBuilder, vectors: list[ir.Value]) -> list[ir.Value]:
    """The inverse."""
    order = [half + i for i in range(LANES) for half in (0, LANES)]
    return _shuffled(b, vectors, order[:LANES], order[LANES:])


def _shuffled(b: ir.IRBuilder, vectors: list[ir.Value], first: list[int], second: list[int]) -> list[ir.Value]:
    found = []
    for one, two in zip(vectors[0::2], vectors[1::2], strict=False):
        found += [b.shuffle_vector(one, two, ir.Constant(_INTS, order)) for order in (first, second)]
    return found + vectors[len(found) :]


def _prefetch(b: ir.IRBuilder, address: ir.Value, written: bool = False) -> None:
    """Asks for a line of memory that will be read, or written; no address is wrong."""
    bytes_at = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [bytes_at, _I32, _I32, _I32])
    ask = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
    b.call(ask, [b.inttoptr(address, bytes_at), _I32(int(written)), _I32(_NEAR), _I32(1)])


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
