"""What threads need of each other's memory, and the system calls with which they sleep, wake and give way, as LLVM IR."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from forefetch.kernels.compiled.simd import intrinsic

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


@intrinsic
def get(context, address):
    """The int64 there; what was written before it was put there is seen."""

    def generate(ctx, b, signature, arguments):
        return b.load_atomic(_word(b, arguments[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def put(context, address, value):
    """Puts an int64 there, for `get`."""

    def generate(ctx, b, signature, arguments):
        b.store_atomic(arguments[1], _word(b, arguments[0]), "seq_cst", 8)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def add(context, address, value):
    """Adds to the int64 there."""

    def generate(ctx, b, signature, arguments):
        b.atomic_rmw("add", _word(b, arguments[0]), arguments[1], "seq_cst")
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def replace(context, address, expected, value):
    """Puts an int64 there if `expected` is there; whether it did."""

    def generate(ctx, b, signature, arguments):
        address, expected, value = arguments
        pair = b.cmpxchg(_word(b, address), expected, value, "seq_cst", "seq_cst")
        return b.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def hear(context, file):
    """Sleeps until a byte is in the pipe, and takes it: 1; 0: the pipe's other end was closed; -1: a signal came."""

    def generate(ctx, b, signature, arguments):
        return _transfer(b, "read", arguments[0])

    return types.int64(types.int64), generate


@intrinsic
def ring(context, file):
    """Puts a byte into the pipe."""

    def generate(ctx, b, signature, arguments):
        _transfer(b, "write", arguments[0])
        return ctx.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def give_way(context):
    """Lets another thread that waits for this core have it."""

    def generate(ctx, b, signature, arguments):
        b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(_I32, []), "sched_yield"), [])
        return ctx.get_dummy_value()

    return types.void(), generate


def _word(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.inttoptr(address, _I64.as_pointer())


def _transfer(b: ir.IRBuilder, name: str, file: ir.Value) -> Any:
    """read(2) or write(2) of one byte."""
    byte = cgutils.alloca_once_value(b, _I8(1))
    kind = ir.FunctionType(_I64, [_I32, _I8.as_pointer(), _I64])
    function = cgutils.get_or_insert_function(b.module, kind, name)
    return b.call(function, [b.trunc(file, _I32), byte, ir.Constant(_I64, 1)])
