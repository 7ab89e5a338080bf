"""Launches that every format shares, and those of the formats that `portable.py` multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.grouped_mlp import portable, routing
from forefetch.kernels.grouped_mlp.scratch import MoeScratch, unit_size, units

_TYPES = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32, "int8": tl.int8, "int4": tl.int8}
_BLOCK = 256  # pairs that one program of the routing takes where x needs no conversion


@dataclass(frozen=True, slots=True)
class Call:
    """A checked call of `moe` (logits None) or `moe_from_logits` (ids and weights to be written); shapes as there. No `out`:
    pairs are left as they are in scratch."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    logits: Tensor | None
    renormalise: bool
    pool: Tensor
    slot_of: Tensor
    out: Tensor | None
    scratch: MoeScratch

    @property
    def pairs(self) -> int:
        """Tokens times top-k."""
        return len(self.x) * self.scratch.top_k


def place(call: Call, convert: bool = False, pdl: bool = False) -> None:
    """The routing into scratch, with the choice from logits if there are any.

    convert also leaves x in scratch.x_half. pdl: as a programmatic dependent launch, which lets its own dependents start.
    """
    scratch, logits, x = call.scratch, call.logits, call.x
    per_token = convert or logits is not None
    block = triton.next_power_of_2(scratch.top_k if per_token else min(call.pairs, _BLOCK))
    routing.place[(len(x) if per_token else triton.cdiv(call.pairs, block),)](
        *(x, call.ids, call.weights, x if logits is None else logits, call.slot_of),
        *(scratch.x_half, scratch.counts, scratch.table, scratch.live),
        *(call.pairs, scratch.tokens, x.stride(0), 0 if logits is None else logits.stride(0)),
        *(scratch.experts, scratch.top_k, len(scratch.counts), scratch.hidden, triton.next_power_of_2(scratch.hidden), block),
        *(logits is not None, call.renormalise, convert, scratch.format.bits == 4, pdl),
        num_warps=1,
        **dependent(pdl),
    )


def combine(call: Call, pdl: bool = False) -> None:
    """The weighted sum of scratch.y, which also zeroes the counters. Left to whoever reads the pairs if there is no `out`."""
    scratch, out = call.scratch, call.out
    if out is None:
        return
    block = min(512, triton.next_power_of_2(scratch.hidden))
    routing.combine[(len(out), triton.cdiv(scratch.hidden, block))](
        *(scratch.y, call.weights, scratch.live, out, scratch.counts, scratch.ready, out.stride(0)),
        *(scratch.top_k, scratch.hidden, block, len(scratch.counts), len(scratch.ready), pdl),
        num_warps=4,
        **dependent(pdl),
    )


def dependent(pdl: bool) -> dict[str, Any]:
    """Launch options of a programmatic dependent; none otherwise, because older GPUs do not know it."""
    return {"launch_pdl": True} if pdl else {}


def run_portable(call: Call) -> None:
    """Routing, gate/up, down, sum, for blobs in natural order."""
    scratch, form = call.scratch, call.scratch.format
    hidden, width, experts = scratch.hidden, scratch.width, scratch.experts
    size = unit_size(call.pairs, experts)
    most, w13, w2 = units(call.pairs, experts, size), 2 * width * hidden * form.bits // 8, width * hidden * form.bits // 8
    steps = [form.group_of(n) if form.quantised else (64 if n % 64 == 0 else 32) for n in (hidden, width)]
    block = 128 if size == 128 and not form.quantised else 64  # unpacking takes the registers of a wider tile
    shape = {
        **{"E": experts, "EP": len(scratch.counts), "H": hidden, "W": width, "M": size, "BN": block},
        **{"TYPE": _TYPES[form.kind], "BITS": form.bits},
        **{"num_warps": 4 if size <= 32 else 8, "num_stages": 3},
    }
    where = call.pool, call.slot_of, scratch.counts, scratch.table
    place(call)
    portable.gate_up[(most * triton.cdiv(width, block),)](
        *(call.x, *where, scratch.h, scratch.tokens, call.pool.stride(0), w13 + w2, call.x.stride(0)),
        K=scratch.top_k,
        STEP=steps[0],
        **shape,
    )
    portable.down[(most * triton.cdiv(hidden, block),)](
        *(scratch.h, *where, scratch.y, scratch.tokens, call.pool.stride(0), w13, w13 + w2 + w13_scales(scratch, steps[0])),
        STEP=steps[1],
        **shape,
    )
    combine(call)


def w13_scales(scratch: MoeScratch, group: int) -> int:
    """Bytes of the scales of gate and up."""
    return 2 * scratch.width * scratch.hidden // group * 2
