"""Products of few rows with a 16-bit weight that waits in shared memory: all of a program's share is on the way before it waits
for x.

The weight, kept [K, N], is the A operand of wgmma, turned by its descriptor (64 outputs for each four warps, steps of DEPTH
inputs), and x the B operand, so that as few columns are computed as there are rows. Rows come through a ring of `RING`
steps, because with all of them beside the weight fewer programs fit the machine, and one that is not there fetches nothing.
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

from forefetch.kernels.few_rows.held import rows_of_a_program
from forefetch.kernels.few_rows.plans import WaitingPlan
from forefetch.kernels.pdl import early

_WAIT = gl.constexpr("griddepcontrol.wait; mov.b32 $0, $1;")
_RELEASE = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, $1;")


def product(x: Tensor, weight: Tensor, plan: WaitingPlan) -> Tensor:
    """x [T, K], weight [K, N], both bfloat16 or both float16 -> [S, T, N] float32.

    ValueError for what the kernel does not read."""
    (rows, inner), (found, outer) = x.shape, weight.shape
    if inner != found or x.dtype != weight.dtype or x.element_size() != 2 or not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError(f"rows {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} do not fit")
    out = torch.empty((inner // plan.each, rows, outer), dtype=torch.float32, device=x.device)
    height, columns = rows_of_a_program(rows), 16 * plan.warps
    grid = outer // columns, inner // plan.each, triton.cdiv(rows, height)
    sizes = {"K": inner, "N": outer, "EACH": plan.each, "RING": min(plan.ring, plan.each // plan.depth), **early(x)}
    _waiting[grid](x, weight, out, rows, **sizes, **_layouts(height, plan.warps, plan.depth), num_warps=plan.warps)
    return out


@cache
def _layouts(rows: int, warps: int, depth: int) -> dict[str, Any]:
    """Who holds and copies what."""
    by_weight, by_rows = min(2 * warps, 32), min(depth // 8, 32)  # lanes that copy one row of each, 16 bytes each
    return {
        "M": rows,
        "DEPTH": depth,
        "COLUMNS": 16 * warps,
        "ACC": gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 16]),
        "WEIGHT": gl.BlockedLayout([1, 8], [32 // by_weight, by_weight], [warps, 1], [1, 0]),
        "ROWS": gl.BlockedLayout([1, 8], [32 // by_rows, by_rows], [warps, 1], [1, 0]),
        "SHARED": gl.NVMMASharedLayout(128, 16, 2),
    }


@gluon.jit(do_not_specialize=["rows"])
def _waiting(
    x, weight, out, rows,
    K: gl.constexpr, N: gl.constexpr, EACH: gl.constexpr, RING: gl.constexpr, PDL: gl.constexpr, M: gl.constexpr,
    DEPTH: gl.constexpr, COLUMNS: gl.constexpr, ACC: gl.constexpr, WEIGHT: gl.constexpr, ROWS: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    """Program (COLUMNS outputs, EACH inputs, M rows)."""
    STEPS: gl.constexpr = EACH // DEPTH
    tile, share, block = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if PDL:
        block = gl.inline_asm_elementwise(_RELEASE, "=r,r", [block], dtype=gl.int32, is_pure=False, pack=1)
    ws = gl.allocate_shared_memory(weight.dtype.element_ty, [STEPS, DEPTH, COLUMNS], SHARED)
    xs = gl.allocate_shared_memory(x.dtype.element_ty, [RING, M, DEPTH], SHARED)
    i, c = gl.arange(0, DEPTH, gl.SliceLayout(1, WEIGHT)), gl.arange(0, COLUMNS, gl.SliceLayout(0, WEIGHT))
    at = weight + (share * EACH + i).to(gl.int64)[:, None] * N + (tile * COLUMNS + c)[None, :]
    for step in gl.static_range(STEPS):
        async_copy.async_copy_global_to_shared(ws.index(step), at + step * DEPTH * N)
        async_copy.commit_group()
    if PDL:
        block = gl.inline_asm_elementwise(_WAIT, "=r,r", [block], dtype=gl.int32, is_pure=False, pack=1)
    r, k = gl.arange(0, M, gl.SliceLayout(1, ROWS)), gl.arange(0, DEPTH, gl.SliceLayout(0, ROWS))
    row = gl.minimum(block * M + r, rows - 1)
    source = x + (row * K + share * EACH)[:, None] + k[None, :]
    for step in gl.static_range(RING):
        async_copy.async_copy_global_to_shared(xs.index(step), source + step * DEPTH)
        async_copy.commit_group()
    acc = gl.zeros([COLUMNS, M], gl.float32, ACC)
    for step in gl.static_range(STEPS):
        async_copy.wait_group(min(RING, STEPS - step) - 1)
        fence_async_shared()
        turned = ws.index(step).permute((1, 0))
        acc = warpgroup_mma(turned, xs.index(step % RING).permute((1, 0)), acc, is_async=True)
        if step + RING < STEPS:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            async_copy.async_copy_global_to_shared(xs.index(step % RING), source + (step + RING) * DEPTH)
            async_copy.commit_group()
    acc = warpgroup_mma_wait(0, deps=(acc,))
    m = block * M + gl.arange(0, M, gl.SliceLayout(0, ACC))
    n = tile * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, ACC))
    to = out + (share * rows + m)[None, :] * N + n[:, None]
    gl.store(to, acc, mask=(m < rows)[None, :] & (n[:, None] >= 0))
