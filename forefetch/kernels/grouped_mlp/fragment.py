"""Launches for experts in fragment order: `direct` for a few tokens, `persistent` for a batch, `tiled` for prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from forefetch.kernels.gate.triton import choose_into
from forefetch.kernels.grouped_mlp import direct, persistent, tiled
from forefetch.kernels.grouped_mlp.launches import Call, combine, dependent, place
from forefetch.kernels.grouped_mlp.scratch import DIRECT_TOKENS, MoeScratch, unit_size, units

PERSISTENT_TOKENS = 320  # beyond, units of more than eight pairs read the weights fewer times
_DIRECT_BYTES = 72 * 1024  # of a program's shared memory, so that three or more fit an SM
_REGISTERS = 65536  # of an SM, on every GPU since 2012


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the persistent launch is made of; measured on an H200 (benchmarks/LOG.md)."""

    programs: int = 16  # per SM
    stages: int = 3  # of the ring, 2 KB each
    gate_tiles: int = 1  # of 32 weight rows an item of the first product
    down_tiles: int = 1  # and of the second
    short: bool = True  # chains of mma
    registers: int = 128  # cap per thread, so that as many programs fit an SM
    pdl_route: bool = True  # routing as a programmatic dependent of what comes before
    pdl_experts: bool = True  # the experts of the routing
    pdl_combine: bool = True  # the sum of the experts


@dataclass(frozen=True, slots=True)
class Direct:
    """What the direct launches are made of. Warps: the most among which a program's inputs are shared out."""

    gate_warps: int = 4
    down_warps: int = 2
    gate_tiles: int = 1  # of 32 weight rows a program
    down_tiles: int = 1
    registers: int | None = None  # cap per thread of the first product


@dataclass(frozen=True, slots=True)
class Tiled:
    """What the launches for prompts are made of."""

    pairs: int = 64  # of a unit, at most
    tiles: int = 2  # of 32 weight rows a program; wider ones leave no room for a second program beside them
    warps: int = 4
    stages: int = 3


TILED = Tiled()
TUNING = {16: Tuning(), PERSISTENT_TOKENS: Tuning(programs=12, stages=4, gate_tiles=2, down_tiles=2, registers=168)}
"""By tokens, up to as many. Two tiles share what is done for their inputs, but make items too coarse for few experts."""
DIRECT = {1: Direct(registers=112), 2: Direct(), 3: Direct(gate_tiles=2, down_tiles=2)}
"""By tokens; more take the last. With one token the cap leaves room for the second product's programs beside the first's."""


def run(call: Call) -> None:
    """`moe` or `moe_from_logits` for a pool in fragment order. ValueError for strides that do not fit."""
    if call.pool.stride(0) % 2048 or call.x.stride(0) % 8 or call.x.data_ptr() % 16:
        raise ValueError("fragment order needs slots at multiples of 2048 bytes and rows of x at multiples of 16")
    if len(call.x) <= DIRECT_TOKENS and _fits_direct(call.scratch):
        run_direct(call)
    elif len(call.x) <= PERSISTENT_TOKENS:
        run_persistent(call)
    else:
        run_tiled(call)


def _fits_direct(scratch: MoeScratch) -> bool:
    return max(scratch.hidden, scratch.width) // 128 * _step_bytes(scratch) <= _DIRECT_BYTES


def _step_bytes(scratch: MoeScratch) -> int:
    """Of 32 rows and 128 inputs: codes and scales."""
    return 512 * scratch.format.bits + 64 * (128 // scratch.format.group)


def run_direct(call: Call, tuning: Direct | None = None) -> None:
    """Both products a launch each, no routing; the second one adds up, if there is an `out`."""
    tuning = tuning or DIRECT[min(len(call.x), max(DIRECT))]
    if call.logits is not None and not _reads_logits(call.logits):
        call = _chosen(call, call.logits)
    pdl = _has_pdl(call.x.device)
    _product(call, tuning, gate=True, pdl=pdl)
    _product(call, tuning, gate=False, pdl=pdl)


def _reads_logits(logits: Tensor) -> bool:
    return logits.element_size() == 2 and logits.is_contiguous() and logits.shape[1] <= 1024


def _chosen(call: Call, logits: Tensor) -> Call:
    """The same call with its choice made."""
    shape = (len(call.x), call.scratch.top_k)
    ids, weights = call.ids[: call.pairs].view(shape), call.weights[: call.pairs].view(shape)
    choose_into(logits, ids, weights, "softmax_topk", call.renormalise)
    return replace(call, logits=None)


def _product(call: Call, tuning: Direct, gate: bool, pdl: bool) -> None:
    scratch, x, pool, out = call.scratch, call.x, call.pool, call.out
    hidden, width = scratch.hidden, scratch.width
    steps, tiles = (hidden // 128, width // 16) if gate else (width // 128, hidden // 32)
    warps = next(n for n in (8, 4, 2, 1) if n <= (tuning.gate_warps if gate else tuning.down_warps) and steps % n == 0)
    wide = tuning.gate_tiles if gate else tuning.down_tiles
    if tiles % wide or wide * steps * _step_bytes(scratch) > _DIRECT_BYTES:
        wide = 1
    direct.product[(call.pairs * tiles // wide,)](
        *(
            (x if gate else scratch.h).view(torch.int32),
            call.ids,
            call.weights,
            call.ids if call.logits is None else call.logits,
        ),
        *(call.slot_of, pool.view(torch.int32), pool.view(torch.float16), scratch.h if gate else scratch.y),
        *(scratch.y if out is None else out, scratch.live, scratch.done, _constants(x.device, scratch.format.bits)),
        *(pool.stride(0) // 2048, x.stride(0) // 2, 0 if out is None else out.stride(0)),
        *(hidden, width, scratch.experts, scratch.top_k, gate, gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16),
        *(wide, call.logits is not None, call.renormalise, out is not None, pdl),
        **direct.layouts(warps, scratch.format.group, scratch.format.bits, scratch.experts),
        num_warps=warps,
        maxnreg=tuning.registers if gate else None,
        **dependent(pdl),
    )


def run_persistent(call: Call, tuning: Tuning | None = None) -> None:
    """Routing, both products in one launch, sum."""
    tuning = tuning or next(of for tokens, of in TUNING.items() if len(call.x) <= tokens)
    scratch, pool, device = call.scratch, call.pool, call.x.device
    pdl = _has_pdl(device)
    early = pdl and tuning.pdl_experts
    place(call, convert=True, pdl=pdl and tuning.pdl_route)
    persistent.experts[(_programs(device, tuning, _step_bytes(scratch)),)](
        *(scratch.x_half.view(torch.int32), pool.view(torch.int32), pool.view(torch.float16), call.slot_of),
        *(scratch.counts, scratch.table, scratch.h.view(torch.int32), scratch.h, scratch.y),
        *(scratch.ready, scratch.tickets, scratch.fault, _constants(device, scratch.format.bits)),
        *(scratch.tokens, pool.stride(0) // 2048, scratch.hidden, scratch.width, scratch.experts, scratch.top_k),
        *(stages(scratch, tuning), tuning.gate_tiles, tuning.down_tiles, tuning.short, early),
        **persistent.layouts(scratch.format.group, scratch.format.bits, scratch.experts),
        num_warps=1,
        maxnreg=tuning.registers,
        **dependent(early),
    )
    combine(call, pdl and tuning.pdl_combine)


def stages(scratch: MoeScratch, tuning: Tuning) -> int:
    """Of the ring: what is loaded ahead must lie in this item or the next, and an item may have so few stages."""
    fewest = min(scratch.hidden * tuning.gate_tiles, scratch.width * tuning.down_tiles) // 128
    return min(tuning.stages, fewest + 1)


def run_tiled(call: Call, tuning: Tiled | None = None) -> None:
    """Routing, gate/up, down, sum, with a tile of up to `pairs` pairs a program."""
    tuning = tuning or TILED
    scratch, pool = call.scratch, call.pool
    hidden, width, experts = scratch.hidden, scratch.width, scratch.experts
    size = min(tuning.pairs, unit_size(call.pairs, experts))
    most = units(call.pairs, experts, size)
    tiles = tuning.tiles if hidden // 32 % tuning.tiles == 0 and width // 16 % tuning.tiles == 0 else 2
    where = pool.view(torch.int32), pool.view(torch.float16), call.slot_of, scratch.counts, scratch.table
    shape = {
        **{"E": experts, "EP": len(scratch.counts), "H": hidden, "W": width, "M": size, "TILES": tiles},
        **{"GROUP": scratch.format.group, "BITS": scratch.format.bits},
        **{"num_warps": tuning.warps, "num_stages": tuning.stages},
    }
    place(call, convert=True)
    tiled.gate_up[(most * (width // 16 // tiles),)](
        *(scratch.x_half, *where, scratch.h, scratch.tokens, pool.stride(0) // 2048), K=scratch.top_k, **shape
    )
    tiled.down[(most * (hidden // 32 // tiles),)](
        *(scratch.h, *where, scratch.y, scratch.tokens, pool.stride(0) // 2048), **shape
    )
    combine(call)


@cache
def _programs(device: torch.device, tuning: Tuning, step: int) -> int:
    """As many as are resident together: registers and shared memory of an SM divided by a program's."""
    properties = torch.cuda.get_device_properties(device)
    registers = _REGISTERS // (32 * tuning.registers)
    memory = int(properties.shared_memory_per_multiprocessor) // (tuning.stages * step + 1024)
    return int(properties.multi_processor_count) * min(tuning.programs, registers, memory)


@cache
def _has_pdl(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _constants(device: torch.device, bits: int) -> Tensor:
    """float16 bits of minus the codes' offset times 2^-24, for inputs with bit 1 clear and set: int4 has these times 16."""
    return torch.tensor([{4: 0x8008, 8: 0x8080}[bits] - 65536, 0x8080 - 65536], dtype=torch.int16, device=device)
