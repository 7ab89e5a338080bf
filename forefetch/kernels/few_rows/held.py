"""Products of few rows with 8-bit codes that wait in registers: all of a program's codes are on the way before it waits for x.

The codes are the A operand of wgmma (64 outputs, 16 inputs), x the B operand, from shared memory. They lie in the order in
which warps hold that operand, so that a thread's loads are of 16 bytes and nothing is shuffled: a tile of 64 outputs is cut
into steps of 32 inputs, 2 KiB each, whose bytes are, lowest bit first and x3 for bit 3 of x, r the output in the tile and k
the input: r3 k0 | k3 k4 | k1 k2 r0 r1 r2 r4 r5. So byte pairs (0, 2) and (1, 3) of a word become two bfloat16 by three
instructions: the low seven bits in the mantissa of 128, less 128 or, where the sign bit moves the exponent on, 256. Letters as
in the package.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from forefetch.kernels.few_rows.plans import HeldPlan
from forefetch.kernels.few_rows.rounded import Rounded
from forefetch.kernels.pdl import early

_WAIT = gl.constexpr("griddepcontrol.wait; mov.b32 $0, $1;")
_RELEASE = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, $1;")
_UNPACK = gl.constexpr("""{
.reg .b32 t, s, u;
lop3.b32 t, $2, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 s, $2, 0x00800080, 0x43004300, 0xEA;
sub.rn.bf16x2 $0, t, s;
shr.u32 u, $2, 8;
lop3.b32 t, u, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 s, u, 0x00800080, 0x43004300, 0xEA;
sub.rn.bf16x2 $1, t, s;
}""")


def product(x: Tensor, weight: Rounded, plan: HeldPlan) -> Tensor:
    """x [T, K] bfloat16, weight in fragment order -> [S, T, N] float32, or [T, N] of x's type in one share.

    ValueError for what the kernel does not read."""
    (rows, inner), (found, outer) = x.shape, weight.shape
    if not weight.fragments or inner != found or x.dtype != torch.bfloat16 or not x.is_contiguous():
        raise ValueError(f"rows {tuple(x.shape)} {x.dtype} and weight {weight.shape} do not fit")
    shares, columns = inner // plan.each, 16 * plan.warps
    dtype = torch.float32 if shares > 1 else x.dtype
    out = torch.empty((shares, rows, outer), dtype=dtype, device=x.device)
    height = rows_of_a_program(rows)
    grid = outer // columns, shares, triton.cdiv(rows, height)
    form = {"num_warps": plan.warps, **({"maxnreg": plan.registers} if plan.registers else {})}
    sizes = {"K": inner, "N": outer, "EACH": plan.each, **early(x)}
    words = weight.codes.view(torch.int32)
    _held[grid](x, words, weight.scales, out, rows, **sizes, **layouts(height, plan.warps), **form)
    return out if shares > 1 else out[0]


def rows_of_a_program(rows: int) -> int:
    """As wgmma takes them."""
    return min(64, max(8, 1 << (rows - 1).bit_length()))


@cache
def layouts(rows: int, warps: int) -> dict[str, Any]:
    """Who holds what."""
    linear, groups = gl.DistributedLinearLayout, warps // 4
    acc = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 16])
    places = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 512, 0], [0, 1024, 0]]  # bytes of a word, 4 words, 4 steps
    lanes = [[0, 4 << bit, 0] for bit in range(5)]
    own = [[0, 128, 0], [0, 256, 0], [1, 0, 0]][: warps.bit_length() - 1]
    return {
        "WARPS": warps,
        "M": rows,
        "ACC": acc,
        "A": gl.DotOperandLayout(0, acc, 2),
        "WORDS": linear(places, lanes, own, [], [groups, 2048, 4]),
        "COPY": gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0]),
        "SHARED": gl.NVMMASharedLayout(128, 16, 2),
    }


@gluon.jit(do_not_specialize=["rows"])
def _held(
    x, words, scales, out, rows,
    K: gl.constexpr, N: gl.constexpr, EACH: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr, M: gl.constexpr,
    ACC: gl.constexpr, A: gl.constexpr, WORDS: gl.constexpr, COPY: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Program (16 outputs a warp, EACH inputs, M rows)."""
    G: gl.constexpr = WARPS // 4
    STEPS: gl.constexpr = EACH // 128
    tile, share, block = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if PDL:
        block = gl.inline_asm_elementwise(_RELEASE, "=r,r", [block], dtype=gl.int32, is_pure=False, pack=1)
    flat: gl.constexpr = gl.SliceLayout(2, WORDS)
    g, i = gl.arange(0, G, gl.SliceLayout(1, flat)), gl.arange(0, 2048, gl.SliceLayout(0, flat))
    at = words + ((tile * G + g).to(gl.int64) * (K * 16) + share * (EACH * 16))[:, None] + i[None, :]
    mine = ()
    for step in gl.static_range(STEPS):
        mine = mine + (gl.load(at + step * 2048),)  # noqa: RUF005
    n = tile * (64 * G) + gl.arange(0, 64 * G, gl.SliceLayout(1, ACC))
    scale = gl.load(scales + n)
    if PDL:
        block = gl.inline_asm_elementwise(_WAIT, "=r,r", [block], dtype=gl.int32, is_pure=False, pack=1)
    xs = gl.allocate_shared_memory(x.dtype.element_ty, [STEPS, M, 128], SHARED)
    r, k = gl.arange(0, M, gl.SliceLayout(1, COPY)), gl.arange(0, 128, gl.SliceLayout(0, COPY))
    row = gl.minimum(block * M + r, rows - 1)
    source = x + (row * K + share * EACH)[:, None] + k[None, :]
    for step in gl.static_range(STEPS):
        async_copy.async_copy_global_to_shared(xs.index(step), source + step * 128)
        async_copy.commit_group()
    acc = gl.zeros([64 * G, M], gl.float32, ACC)
    for step in gl.static_range(STEPS):
        async_copy.wait_group(STEPS - 1 - step)
        fence_async_shared()
        a = _unpacked(mine[step], G, WORDS, A)
        acc = warpgroup_mma(a, xs.index(step).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    m = block * M + gl.arange(0, M, gl.SliceLayout(0, ACC))
    to = out + (share * rows + m)[None, :] * N + n[:, None]
    gl.store(to, (acc * scale[:, None]).to(out.dtype.element_ty), mask=(m < rows)[None, :] & (n[:, None] >= 0))


@gluon.jit
def _unpacked(words, G: gl.constexpr, WORDS: gl.constexpr, A: gl.constexpr):
    """Words of 128 inputs [G, 2048] -> A operand [64 G, 128]."""
    words = gl.expand_dims(words, 2)
    words, _ = gl.broadcast(words, gl.full([G, 2048, 4], 0, gl.int32, WORDS))
    codes = gl.inline_asm_elementwise(_UNPACK, "=r,=r,r,r,r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=4)
    # group, chunk, warp, r2-0, k2-1, k4, k3, r3, k0
    codes = gl.permute(gl.reshape(codes, (G, 4, 4, 8, 4, 2, 2, 2, 2)), (0, 2, 7, 3, 1, 5, 6, 4, 8))
    return gl.convert_layout(gl.reshape(codes, (64 * G, 128)), A, assert_trivial=True)
