"""The two products for many tokens (prompts), from blobs in fragment order, in plain Triton.

A program takes one unit of M pairs and TILES * 32 weight rows. Codes are unpacked once in registers, into the A operand of a
product with M columns. A code becomes float16 by putting it into the mantissa of a power of two and subtracting that again:
0x6400 | u is 1024 + u. For int4's inputs whose bit 1 is set the power is 2^14, which gives 16 q, because x and h hold a
sixteenth there (`mma.py`). Scales multiply each group's sums in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forefetch.kernels.grouped_mlp.routing import unit_of


@triton.jit
def gate_up(
    x_half, pool, pool_half, slot_of, counts, table, h, room, stride,
    E: tl.constexpr, EP: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TILES: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """h [P, W] float16, prepared as an input, from x_half [T, H] (`routing.place`). stride in 2 KB."""
    BLOCKS: tl.constexpr = W // 16 // TILES
    unit, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    expert, pair, filled = unit_of(unit, counts, table, room, E, EP, M)
    if expert < E:
        base = tl.load(slot_of + expert).to(tl.int64) * stride
        rows = x_half + (pair // K).to(tl.int64) * H
        sums = _product(rows, filled, pool, pool_half, base, block * TILES, 0, H, W, H, M, TILES, GROUP, BITS)
        gate, up = tl.split(tl.permute(tl.reshape(sums, (TILES, 2, 16, M)), (0, 2, 3, 1)))
        gate, up = tl.reshape(gate, (TILES * 16, M)), tl.reshape(up, (TILES * 16, M))
        row = block * (TILES * 16) + tl.arange(0, TILES * 16)
        active = gate / (1.0 + tl.exp(-gate)) * up
        if BITS == 4:
            active *= tl.where((row & 2) == 0, 1.0, 0.0625)[:, None]
        active = tl.where(active > 65504.0, 65504.0, tl.where(active < -65504.0, -65504.0, active))
        tl.store(h + pair.to(tl.int64)[None, :] * W + row[:, None], active.to(tl.float16), mask=filled[None, :])


@triton.jit
def down(
    h, pool, pool_half, slot_of, counts, table, y, room, stride,
    E: tl.constexpr, EP: tl.constexpr, H: tl.constexpr, W: tl.constexpr, M: tl.constexpr, TILES: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """y [P, H] float32 from h [P, W]."""
    BLOCKS: tl.constexpr = H // 32 // TILES
    unit, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    expert, pair, filled = unit_of(unit, counts, table, room, E, EP, M)
    if expert < E:
        base = tl.load(slot_of + expert).to(tl.int64) * stride
        rows = h + pair.to(tl.int64) * W
        sums = _product(rows, filled, pool, pool_half, base, block * TILES, W * H // 2048, H, W, W, M, TILES, GROUP, BITS)
        row = block * (TILES * 32) + tl.arange(0, TILES * 32)
        tl.store(y + pair.to(tl.int64)[None, :] * H + row[:, None], sums, mask=filled[None, :])


@triton.jit
def _product(
    rows, filled, pool, pool_half, base, tile, begin, H: tl.constexpr, W: tl.constexpr, INPUTS: tl.constexpr, M: tl.constexpr,
    TILES: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """[TILES * 32, M] = the weights of the tiles from `tile` on, of the matrix `begin` steps into the blob, times the rows."""
    GROUPS: tl.constexpr = INPUTS // GROUP
    t, i, r = tl.arange(0, TILES), tl.arange(0, GROUP * BITS), tl.arange(0, TILES * 32)
    codes = pool + base * 512 + (begin + tile * (INPUTS // 128)) * (128 * BITS) + t[:, None] * (INPUTS * BITS) + i[None, :]
    scales = pool_half + base * 1024 + 3 * W * H * BITS // 16 + (begin * 128 // GROUP + tile * GROUPS) * 32
    scales += r // 32 * (GROUPS * 32) + _scale_at(r % 32, GROUP)
    sums = tl.zeros([TILES * 32, M], tl.float32)
    k = tl.arange(0, GROUP)
    for group in range(0, GROUPS):
        x = tl.load(rows[None, :] + (group * GROUP + k)[:, None], mask=filled[None, :], other=0.0)
        words = tl.load(codes + group * (GROUP * BITS))
        weights = _unpack(words, TILES, GROUP) if BITS == 4 else _widen(words, TILES, GROUP)
        step = group * 32 if GROUP == 128 else group // 2 * 64 + group % 2 * 4
        scale = tl.load(scales + step).to(tl.float32)
        sums += tl.dot(weights, x) * scale[:, None]
    return sums


@triton.jit
def _scale_at(r, GROUP: tl.constexpr):
    """Where a tile's row has its scale within a step (`fragments.py`)."""
    return (r & 7) * (512 // GROUP) + (r >> 4) * 2 + ((r >> 3) & 1)


@triton.jit
def _unpack(words, TILES: tl.constexpr, GROUP: tl.constexpr):
    """[TILES, GROUP * 4] words -> [TILES * 32, GROUP] float16: q, or 16 q where bit 1 of the input is set.

    `join` keeps a word's eight codes in the thread that has the word: eight inputs side by side, one wide store.
    """
    codes = tl.join(_half(words, 0), _half(words, 16))
    # tile, k6, r4, r2-0, k5-4, k3, r3 | k2, k1, k0 -> tile, r4, r3, r2-0 | k6, k5-4, k3, k2, k1, k0
    codes = tl.reshape(codes, (TILES, GROUP // 64, 2, 8, 4, 2, 2, 2, 2, 2))
    return tl.reshape(tl.permute(codes, (0, 2, 6, 3, 1, 4, 5, 7, 8, 9)), (TILES * 32, GROUP))


@triton.jit
def _widen(words, TILES: tl.constexpr, GROUP: tl.constexpr):
    """[TILES, GROUP * 8] words of int8 -> [TILES * 32, GROUP] float16: q."""
    codes = tl.join(
        tl.join(_byte(words, 0, 0), _byte(words, 0, 16)),  # bytes 0 and 2 are k1 = 0, k0 = 0 and 1
        tl.join(_byte(words, 8, 0), _byte(words, 8, 16)),
    )
    # tile, k6, k2, r4, r2-0, k5-4, k3, r3 | k0, k1 -> tile, r4, r3, r2-0 | k6, k5-4, k3, k2, k1, k0
    codes = tl.reshape(codes, (TILES, GROUP // 64, 2, 2, 8, 4, 2, 2, 2, 2))
    return tl.reshape(tl.permute(codes, (0, 3, 7, 4, 1, 5, 6, 2, 9, 8)), (TILES * 32, GROUP))


@triton.jit
def _byte(words, SHIFT: tl.constexpr, HALF: tl.constexpr):
    both = ((words >> SHIFT) & 0x00FF00FF) | 0x64006400
    return (both >> HALF).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def _half(words, HALF: tl.constexpr):
    """[.., k2, k1] codes of the words' low or high 16 bits, which are k0 = 0 and 1."""
    return tl.join(
        tl.join(_code(words, 0, HALF, False), _code(words, 8, HALF, False)),
        tl.join(_code(words, 4, HALF, True), _code(words, 12, HALF, True)),
    )


@triton.jit
def _code(words, SHIFT: tl.constexpr, HALF: tl.constexpr, TIMES_16: tl.constexpr):
    both = ((words >> SHIFT) & 0x000F000F) | (0x74007400 if TIMES_16 else 0x64006400)  # two codes by one instruction each
    return (both >> HALF).to(tl.int16).to(tl.float16, bitcast=True) - (16512.0 if TIMES_16 else 1032.0)
