"""The two products of a routed expert in plain Triton, for natural-order blobs of every kind and sizes in multiples of 32.

A program takes one unit (`routing.py`) and BN rows of the weights: it multiplies the unit's M gathered rows of x, K inputs at
a time, with codes unpacked in registers and scaled group by group in float32. Arithmetic is in the type of x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forefetch.kernels.grouped_mlp.routing import unit_of


@triton.jit
def gate_up(
    x, pool, slot_of, counts, table, h, room, stride, scales_at, x_row,
    E: tl.constexpr, EP: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, TYPE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """h [P, W] = silu(x w1^T) * (x w3^T) for each pair. `stride` and `scales_at` in bytes; STEP inputs at a time, of
    stored TYPE (int8 also for int4)."""
    BLOCKS: tl.constexpr = (W + BN - 1) // BN
    unit, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    expert, pair, filled = unit_of(unit, counts, table, room, E, EP, M)
    if expert < E:
        base = pool + tl.load(slot_of + expert).to(tl.int64) * stride
        rows = x + (tl.where(filled, pair, 0) // K).to(tl.int64) * x_row
        column = block * BN + tl.arange(0, BN)
        gate = tl.zeros([M, BN], tl.float32)
        up = tl.zeros([M, BN], tl.float32)
        for k in range(0, H, STEP):
            low, high = _inputs(rows, filled, k, STEP, BITS)
            gate = _product(gate, low, high, base, scales_at, k, column, column < W, 2 * W, STEP, TYPE, BITS)
            up = _product(up, low, high, base, scales_at, k, column + W, column < W, 2 * W, STEP, TYPE, BITS)
        active = gate / (1.0 + tl.exp(-gate)) * up
        to = h + pair.to(tl.int64)[:, None] * W + column[None, :]
        tl.store(to, active.to(h.dtype.element_ty), mask=filled[:, None] & (column < W)[None, :])


@triton.jit
def down(
    h, pool, slot_of, counts, table, y, room, stride, codes_at, scales_at,
    E: tl.constexpr, EP: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, TYPE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """y [P, H] float32 = h w2^T for each pair."""
    BLOCKS: tl.constexpr = (H + BN - 1) // BN
    unit, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    expert, pair, filled = unit_of(unit, counts, table, room, E, EP, M)
    if expert < E:
        base = pool + tl.load(slot_of + expert).to(tl.int64) * stride
        rows = h + tl.where(filled, pair, 0).to(tl.int64) * W
        column = block * BN + tl.arange(0, BN)
        total = tl.zeros([M, BN], tl.float32)
        for k in range(0, W, STEP):
            low, high = _inputs(rows, filled, k, STEP, BITS)
            at = base + codes_at, scales_at - codes_at
            total = _product(total, low, high, at[0], at[1], k, column, column < H, H, STEP, TYPE, BITS)
        to = y + pair.to(tl.int64)[:, None] * H + column[None, :]
        tl.store(to, total, mask=filled[:, None] & (column < H)[None, :])


@triton.jit
def _inputs(rows, filled, k, STEP: tl.constexpr, BITS: tl.constexpr):
    """[M, STEP] of the rows; for int4 the two halves that low and high nibbles belong to."""
    WIDTH: tl.constexpr = STEP // 2 if BITS == 4 else STEP
    at = rows[:, None] + (k + tl.arange(0, WIDTH))[None, :]
    low = tl.load(at, mask=filled[:, None], other=0.0)
    high = tl.load(at + WIDTH, mask=filled[:, None], other=0.0) if BITS == 4 else low
    return low, high


@triton.jit
def _product(
    total, low, high, codes, scales_at, k, column, inside, R, STEP: tl.constexpr, TYPE: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """total += inputs k .. k + STEP times the matrix [INPUTS, R] at `codes`, columns `column`."""
    weights = codes.to(tl.pointer_type(TYPE), bitcast=True)
    WIDTH: tl.constexpr = STEP // 2 if BITS == 4 else STEP
    first = k // 2 if BITS == 4 else k
    at = (first + tl.arange(0, WIDTH))[:, None] * R + column[None, :]
    tile = tl.load(weights + at, mask=inside[None, :], other=0)
    if BITS >= 16:
        total = tl.dot(low, tile.to(low.dtype), total, input_precision="ieee")
    else:
        scales = (codes + scales_at).to(tl.pointer_type(tl.float16), bitcast=True)
        scale = tl.load(scales + (k // STEP) * R + column, mask=inside, other=0.0).to(tl.float32)
        if BITS == 8:
            part = tl.dot(low, tile.to(low.dtype), input_precision="ieee")
        else:
            part = tl.dot(low, ((tile << 4) >> 4).to(low.dtype), input_precision="ieee")
            part = tl.dot(high, (tile >> 4).to(low.dtype), part, input_precision="ieee")
        total += part * scale[None, :]
    return total
