"""Launches for int4 experts in fragment order: `direct` for a few tokens, `persistent` for a batch, `tiled` for prompts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from forefetch.kernels.grouped_mlp import direct, moe, persistent, tiled

DIRECT_TOKENS = 4  # up to here a unit of one pair is faster than finding out who shares an expert
PERSISTENT_TOKENS = 768  # beyond, units of more than eight pairs read the weights fewer times
_DIRECT_BYTES = 64 * 1024  # of a program's shared memory, so that three or more fit an SM
_REGISTERS = 65536  # of an SM, on every GPU since 2012


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the persistent launch is made of; measured on an H200 (benchmarks/LOG.md)."""

    programs: int = 16  # per SM
    stages: int = 3  # of the ring, 2 KB each
    short: bool = True  # chains of mma
    registers: int = 128  # cap per thread; without one, not all programs may be resident
    pdl_route: bool = True  # routing as a programmatic dependent of what comes before
    pdl_experts: bool = True  # the experts of the routing
    pdl_combine: bool = True  # the sum of the experts


TUNING = Tuning()


def run(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    logits: Tensor | None,
    renormalise: bool,
    pool: Tensor,
    slot_of: Tensor,
    out: Tensor,
    scratch: moe.MoeScratch,
) -> None:
    """`moe` or `moe_from_logits` for a pool in fragment order; arguments as there. ValueError for strides that do not fit."""
    if pool.stride(0) % 2048 or x.stride(0) % 8 or x.data_ptr() % 16:
        raise ValueError("fragment order needs slots at multiples of 2048 bytes and rows of x at multiples of 16")
    if len(x) <= DIRECT_TOKENS and _fits_direct(scratch):
        _direct(x, ids, weights, logits, renormalise, pool, slot_of, out, scratch)
    elif len(x) <= PERSISTENT_TOKENS:
        _persistent(x, ids, weights, logits, renormalise, pool, slot_of, out, scratch)
    else:
        _tiled(x, ids, weights, logits, renormalise, pool, slot_of, out, scratch)


def _fits_direct(scratch: moe.MoeScratch) -> bool:
    return max(scratch.hidden, scratch.width) // 128 * 2176 <= _DIRECT_BYTES


def _direct(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    logits: Tensor | None,
    renormalise: bool,
    pool: Tensor,
    slot_of: Tensor,
    out: Tensor,
    scratch: moe.MoeScratch,
) -> None:
    hidden, width, experts, top_k = scratch.hidden, scratch.width, scratch.experts, scratch.top_k
    if logits is not None and (logits.element_size() != 2 or not logits.is_contiguous() or experts > 1024):
        from forefetch.kernels.gate.triton import choose_into

        shape = (len(x), top_k)
        chosen = ids[: len(x) * top_k].view(shape), weights[: len(x) * top_k].view(shape)
        choose_into(logits, *chosen, "softmax_topk", renormalise)
        logits = None
    routed = (ids, weights, ids if logits is None else logits, slot_of, pool.view(torch.int32), pool.view(torch.float16))
    stride, pdl, group = pool.stride(0) // 2048, _has_pdl(x.device), scratch.format.group
    choice = {"CHOOSE": logits is not None, "RENORMALISE": renormalise, "PDL": pdl}
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}

    def product(gate: bool) -> None:
        steps, tiles = (hidden // 128, width // 16) if gate else (width // 128, hidden // 32)
        warps = next(n for n in ((4, 2, 1) if gate else (2, 1)) if steps % n == 0)
        direct.product[(len(x) * top_k * tiles,)](
            *((x if gate else scratch.h).view(torch.int32), *routed, scratch.h if gate else scratch.y),
            *(scratch.live, _constants(x.device), stride, x.stride(0) // 2),
            *(hidden, width, experts, top_k, gate, gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16),
            **choice,
            **direct.layouts(warps, group, experts),
            num_warps=warps,
            **launch,
        )

    product(gate=True)
    product(gate=False)
    moe.combine(weights, out, scratch, pdl)


def _persistent(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    logits: Tensor | None,
    renormalise: bool,
    pool: Tensor,
    slot_of: Tensor,
    out: Tensor,
    scratch: moe.MoeScratch,
    tuning: Tuning = TUNING,
) -> None:
    pdl = _has_pdl(x.device)
    moe.place(x, ids, weights, logits, renormalise, slot_of, scratch, convert=True, pdl=pdl and tuning.pdl_route)
    words, halves, h = pool.view(torch.int32), pool.view(torch.float16), scratch.h
    early = pdl and tuning.pdl_experts
    persistent.experts[(_programs(x.device, tuning),)](
        *(scratch.x_half.view(torch.int32), words, halves, slot_of, scratch.counts, scratch.table, h.view(torch.int32), h),
        *(scratch.y, scratch.ready, scratch.fault, _constants(x.device), scratch.tokens, pool.stride(0) // 2048),
        *(scratch.hidden, scratch.width, scratch.experts, scratch.top_k, tuning.stages, tuning.short, early),
        **persistent.layouts(scratch.format.group, scratch.experts),
        num_warps=1,
        maxnreg=tuning.registers,
        **({"launch_pdl": True} if early else {}),
    )
    moe.combine(weights, out, scratch, pdl and tuning.pdl_combine)


def _tiled(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    logits: Tensor | None,
    renormalise: bool,
    pool: Tensor,
    slot_of: Tensor,
    out: Tensor,
    scratch: moe.MoeScratch,
) -> None:
    hidden, width, experts = scratch.hidden, scratch.width, scratch.experts
    pairs = len(x) * scratch.top_k
    size = min(64, moe.unit_size(pairs, experts))
    moe.place(x, ids, weights, logits, renormalise, slot_of, scratch, convert=True)
    where = pool.view(torch.int32), pool.view(torch.float16), slot_of, scratch.counts, scratch.table
    sizes = {"E": experts, "EP": len(scratch.counts), "H": hidden, "W": width, "M": size, "GROUP": scratch.format.group}
    options = {"num_warps": 4, "num_stages": 3}
    most = moe.units(pairs, experts, size)
    tiles = 2  # of 32 rows, of which gate/up has width / 16
    tiled.gate_up[(most * (width // 16 // tiles),)](
        *(scratch.x_half, *where, scratch.h, scratch.tokens, pool.stride(0) // 2048),
        **sizes,
        K=scratch.top_k,
        TILES=tiles,
        **options,
    )
    tiled.down[(most * (hidden // 32 // tiles),)](
        *(scratch.h, *where, scratch.y, scratch.tokens, pool.stride(0) // 2048),
        **sizes,
        TILES=tiles,
        **options,
    )
    moe.combine(weights, out, scratch)


@cache
def _programs(device: torch.device, tuning: Tuning) -> int:
    """As many as are resident together: registers and shared memory of an SM divided by a program's."""
    properties = torch.cuda.get_device_properties(device)
    registers = _REGISTERS // (32 * tuning.registers)
    memory = int(properties.shared_memory_per_multiprocessor) // (tuning.stages * 2176 + 1024)
    return int(properties.multi_processor_count) * min(tuning.programs, registers, memory)


@cache
def _has_pdl(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _constants(device: torch.device) -> Tensor:
    """float16 bits of -8 * 2^-24 and of 16 times that."""
    return torch.tensor([0x8008 - 65536, 0x8080 - 65536], dtype=torch.int16, device=device)
