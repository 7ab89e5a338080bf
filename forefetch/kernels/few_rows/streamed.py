"""Products of few rows with a wide weight in 8 bits, a head's: codes and x stream through shared memory.

All rows of x pass through every program once for its columns, and for 64 rows that is as many bytes as 128 columns of codes. So
a program has several tiles of columns for each warpgroup (`StreamedPlan.tiles`), as many as its registers hold sums and codes
for; codes lie and become operands as in `held.py`. A product is in one share: each sum is made by one warp in one order.
Letters as in the package.
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

from forefetch.kernels.few_rows import held
from forefetch.kernels.few_rows.held import _RELEASE, _WAIT, _unpacked, rows_of_a_program
from forefetch.kernels.few_rows.plans import StreamedPlan
from forefetch.kernels.few_rows.rounded import Rounded
from forefetch.kernels.pdl import early

WARPS = 8


def product(x: Tensor, weight: Rounded, plan: StreamedPlan) -> Tensor:
    """x [T, K] bfloat16, weight in fragment order -> [T, N] of x's type. ValueError for what the kernel does not read."""
    (rows, inner), (found, outer) = x.shape, weight.shape
    if not weight.fragments or inner != found or x.dtype != torch.bfloat16 or not x.is_contiguous() or inner % 128:
        raise ValueError(f"rows {tuple(x.shape)} {x.dtype} and weight {weight.shape} do not fit")
    out = torch.empty((rows, outer), dtype=x.dtype, device=x.device)
    height, columns = rows_of_a_program(rows), 16 * WARPS * plan.tiles
    grid = triton.cdiv(outer, columns), triton.cdiv(rows, height)
    sizes = {"K": inner, "N": outer, "RING": min(plan.ring, inner // 128), "TILES": plan.tiles, **early(x)}
    words = weight.codes.view(torch.int32)
    _streamed[grid](x, words, weight.scales, out, rows, **sizes, **_layouts(height), num_warps=WARPS)
    return out


@cache
def _layouts(rows: int) -> dict[str, Any]:
    return {**held.layouts(rows, WARPS), "PLAIN": gl.SwizzledSharedLayout(1, 1, 1, [1, 0])}


@gluon.jit(do_not_specialize=["rows"])
def _streamed(
    x, words, scales, out, rows,
    K: gl.constexpr, N: gl.constexpr, RING: gl.constexpr, TILES: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr,
    M: gl.constexpr, ACC: gl.constexpr, A: gl.constexpr, WORDS: gl.constexpr, COPY: gl.constexpr, SHARED: gl.constexpr,
    PLAIN: gl.constexpr,
):  # fmt: skip
    """Program (TILES times 16 outputs a warp, M rows)."""
    G: gl.constexpr = WARPS // 4
    STEPS: gl.constexpr = K // 128
    first, block = gl.program_id(0) * TILES, gl.program_id(1)
    if PDL:
        block = gl.inline_asm_elementwise(_RELEASE, "=r,r", [block], dtype=gl.int32, is_pure=False, pack=1)
    flat: gl.constexpr = gl.SliceLayout(2, WORDS)
    g, i = gl.arange(0, G, gl.SliceLayout(1, flat)), gl.arange(0, 2048, gl.SliceLayout(0, flat))
    codes = gl.allocate_shared_memory(gl.int32, [RING * TILES, G, 2048], PLAIN)
    xs = gl.allocate_shared_memory(x.dtype.element_ty, [RING, M, 128], SHARED)
    at, accs = (), ()
    for tile in gl.static_range(TILES):
        number = gl.minimum((first + tile) * G + g, N // 64 - 1)  # behind the last tile its codes again, never stored
        at = at + (words + (number.to(gl.int64) * (K * 16))[:, None] + i[None, :],)  # noqa: RUF005
        accs = accs + (gl.zeros([64 * G, M], gl.float32, ACC),)  # noqa: RUF005
    for step in gl.static_range(RING - 1):
        _copy(codes, step, at, step, TILES)
    if PDL:
        block = gl.inline_asm_elementwise(_WAIT, "=r,r", [block], dtype=gl.int32, is_pure=False, pack=1)
    r, k = gl.arange(0, M, gl.SliceLayout(1, COPY)), gl.arange(0, 128, gl.SliceLayout(0, COPY))
    source = x + (gl.minimum(block * M + r, rows - 1) * K)[:, None] + k[None, :]
    for step in gl.static_range(RING - 1):
        async_copy.async_copy_global_to_shared(xs.index(step), source + step * 128)
        async_copy.commit_group()  # the first holds all codes so far, too
    for step in range(STEPS):
        async_copy.wait_group(RING - 2)
        fence_async_shared()
        later = step + RING - 1  # into the place that the last step was read from
        if later < STEPS:
            _copy(codes, later % RING, at, later, TILES)
            async_copy.async_copy_global_to_shared(xs.index(later % RING), source + later * 128)
        async_copy.commit_group()
        values, sums = xs.index(step % RING).permute((1, 0)), ()
        for tile in gl.static_range(TILES):
            a = _unpacked(codes.index(step % RING * TILES + tile).load(flat), G, WORDS, A)
            sums = sums + (warpgroup_mma(a, values, accs[tile], is_async=True),)  # noqa: RUF005
        accs = warpgroup_mma_wait(0, deps=sums)
    m = block * M + gl.arange(0, M, gl.SliceLayout(0, ACC))
    for tile in gl.static_range(TILES):
        n = (first + tile) * (64 * G) + gl.arange(0, 64 * G, gl.SliceLayout(1, ACC))
        scale = gl.load(scales + n, mask=n < N, other=0.0)
        to = out + m[None, :] * N + n[:, None]
        gl.store(to, (accs[tile] * scale[:, None]).to(out.dtype.element_ty), mask=(m < rows)[None, :] & (n < N)[:, None])


@gluon.jit
def _copy(codes, place, at, step, TILES: gl.constexpr):
    for tile in gl.static_range(TILES):
        async_copy.async_copy_global_to_shared(codes.index(place * TILES + tile), at[tile] + step * 2048)
