"""Launches of `put` and `take` (the router's side of a call) and of `turn` (the worker's), and their kernels.

Addresses of the other side are read from a table on the device, so that a recorded router step outlives the worker that it was
recorded for. A table of zeros means that nobody is there: `put` does nothing and `take` gives zeros, which is how steps are
recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from forefetch.kernels.gate.triton import top_k

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Offsets:
    """Bytes from an area's start; the signal is at 0. place_ids: of a layer's ids from the one before."""

    ids: int
    place_ids: int
    weights: int
    x: int
    results: int


@dataclass(frozen=True)
class State:
    """What a router's calls share, on its device. W lanes, R turns of replicas, L MoE layers, E experts."""

    table: Tensor  # [W, 2] int64: the worker's inbox, our outbox for it; 0: not there
    counts: Tensor  # [2, W] int32: calls sent, programs arrived
    fault: Tensor  # [1] int32: 0, or 1 + the lane that did not answer
    owners: Tensor  # [room, L, E] int32
    turns: Tensor  # [1] int32: R <= room


def put(
    state: State, at: Offsets, place: int, first: int, x: Tensor, logits: Tensor, idle: Tensor, top: int, renormalise: bool
) -> None:
    """Sends x [N, H] with the choice from logits [N, E] as rows first .. first + N of layer `place`; idle [N] bool: no
    experts."""
    (rows, hidden), (lanes, _), experts = x.shape, state.table.shape, logits.shape[1]
    if x.stride(1) != 1 or logits.stride(1) != 1 or len(logits) != rows or idle.shape != (rows,) or not idle.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)}, logits {tuple(logits.shape)}, idle {tuple(idle.shape)}")
    _put[(rows, lanes)](
        *(state.table, state.counts, state.fault, state.owners, state.turns, x, logits, idle),
        *(at.ids + place * at.place_ids, at.weights, at.x, place * experts, first, state.owners.stride(0)),
        *(x.stride(0), logits.stride(0)),
        *(lanes, hidden, triton.next_power_of_2(hidden), experts, triton.next_power_of_2(experts), top, renormalise),
        num_warps=1,
    )


def take(state: State, at: Offsets, first: int, out: Tensor, lag: int, patience_ns: int, own: int = -1) -> None:
    """out [N, H] = sum over lanes of result rows first .. first + N, once all have answered the call `lag` before the last.

    own: a lane whose rows this stream has evaluated itself; nobody signals them."""
    if not out.is_contiguous():
        raise ValueError("out must be contiguous")
    block = 1024
    _take[(triton.cdiv(out.numel(), block),)](
        *(state.table, state.counts, state.fault, out, at.results, first * out.shape[1], out.numel(), lag, patience_ns),
        *(len(state.table), own, block, _TYPES[out.dtype]),
        num_warps=1,  # every warp of a program looks at the signal
    )


def told(state: State, told_at: int, out: Tensor) -> None:
    """out int64 [W, N] = what the workers have written at byte `told_at` of their outboxes; behind the step's last `take`."""
    words = out.shape[1]
    _told[(len(out),)](state.table, out, told_at, words, triton.next_power_of_2(words), num_warps=1)


def turn(inbox: Tensor, outbox: Tensor, state: Tensor, lock: Tensor, patience_ns: int, *, answer: bool, wait: bool) -> None:
    """One program between a worker's calls: signals that the last one's results are in `outbox`, awaits the next in `inbox`.

    state [3] int32: calls taken, fault, whether we hold the lock. lock [1] int32 is held from the wait to the answer, so that
    what runs between has the device to itself among all who take it; not, if it could not be had in time (fault 2). Without
    inbox and outbox (empty tensors) only the lock is moved.
    """
    _turn[(1,)](inbox, outbox, state, lock, patience_ns, inbox.numel() > 0, answer, wait, num_warps=1)


@triton.jit(do_not_specialize=["ids_at", "weights_at", "x_at", "owners_at", "first"])
def _put(
    table, counts, fault, owners, turns, x, logits, idle, ids_at, weights_at, x_at, owners_at, first, owners_stride,
    x_stride, logits_stride, LANES: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    K: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    row, lane = tl.program_id(0), tl.program_id(1)
    inbox = tl.load(table + 2 * lane)
    broken = tl.load(fault, volatile=True)
    if (inbox != 0) & (broken == 0):
        at = (first + row).to(tl.int64)
        chosen, place, weight = top_k(logits + row.to(tl.int64) * logits_stride, E, K, EP, RENORMALISE)
        expert = tl.arange(0, EP)
        mine = tl.load(idle + row).to(tl.int32) == 0
        if LANES > 1:
            turn = (first + row + expert) % tl.load(turns)
            owner = tl.load(owners + turn * owners_stride + owners_at + expert, mask=chosen, other=-1)
            mine = mine & (owner == lane)
        ids = (inbox + ids_at).to(tl.pointer_type(tl.int32)) + at * K
        weights = (inbox + weights_at).to(tl.pointer_type(tl.float32)) + at * K
        tl.store(ids + place, tl.where(mine, expert, -1), mask=chosen)
        tl.store(weights + place, weight, mask=chosen)
        column = tl.arange(0, HP)
        values = tl.load(x + row.to(tl.int64) * x_stride + column, mask=column < H)
        rows = tl.multiple_of((inbox + x_at).to(tl.pointer_type(x.dtype.element_ty)) + at * H, 16)
        tl.store(rows + column, values, mask=column < H)
        # The last program of a lane to arrive speaks for all: what the others wrote happened before their arrival.
        tl.debug_barrier()
        arrived = tl.atomic_add(counts + LANES + lane, 1, sem="acq_rel", scope="sys")
        if arrived == tl.num_programs(0) - 1:
            number = tl.load(counts + lane) + 1
            tl.store(counts + lane, number)
            tl.store(counts + LANES + lane, 0)
            _signal(inbox, number)


@triton.jit
def _told(table, out, told_at, WORDS: tl.constexpr, ROOM: tl.constexpr):
    lane, word = tl.program_id(0), tl.arange(0, ROOM)
    outbox = tl.load(table + 2 * lane + 1)
    said = (outbox + told_at).to(tl.pointer_type(tl.int64)) + word
    counts = tl.load(said, mask=(outbox != 0) & (word < WORDS), other=0, cache_modifier=".cg")
    tl.store(out + lane * WORDS + word, counts, mask=word < WORDS)


@triton.jit(do_not_specialize=["first", "lag"])
def _take(
    table, counts, fault, out, results_at, first, size, lag, patience_ns, LANES: tl.constexpr, OWN: tl.constexpr,
    BLOCK: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for lane in tl.static_range(LANES):
        outbox = tl.load(table + 2 * lane + 1)
        if outbox != 0:
            if lane != OWN:
                _await(outbox, tl.load(counts + lane) - lag, fault, lane + 1, patience_ns)
            results = tl.multiple_of((outbox + results_at).to(tl.pointer_type(TYPE)) + first, 16)
            total += tl.load(results + element, mask=element < size, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(out + element, total.to(out.dtype.element_ty), mask=element < size)


@triton.jit
def _turn(inbox, outbox, state, lock, patience_ns, LANE: tl.constexpr, ANSWER: tl.constexpr, WAIT: tl.constexpr):
    if ANSWER:
        if tl.load(state + 2) != 0:
            tl.atomic_xchg(lock, 0, sem="release", scope="gpu")
            tl.store(state + 2, 0)
        if LANE:
            if tl.load(state + 1, volatile=True) == 0:
                _signal(outbox.to(tl.int64), tl.load(state))
    if WAIT:
        if LANE:
            number = tl.load(state) + 1
            _await(inbox.to(tl.int64), number, state + 1, 1, patience_ns)
            tl.store(state, number)
        began = _now()
        held = tl.atomic_cas(lock, 0, 1, sem="acquire", scope="gpu")
        while (held != 0) & (_now() - began < patience_ns):
            held = tl.atomic_cas(lock, 0, 1, sem="acquire", scope="gpu")
        tl.store(state + 2, (held == 0).to(tl.int32))
        if held != 0:
            tl.atomic_cas(state + 1, 0, 2, sem="relaxed", scope="gpu")


@triton.jit
def _await(flag, number, fault, blame, patience_ns):
    """Until the signal at `flag` has counted to `number`, for patience_ns at most; then `fault` becomes `blame`."""
    seen = _look(flag)
    broken = tl.load(fault, volatile=True)
    began = _now()
    late = False
    while (seen - number < 0) & (broken == 0) & (not late):
        seen = _look(flag)
        broken = tl.load(fault, volatile=True)
        late = _now() - began > patience_ns
    if (seen - number < 0) & (broken == 0):
        tl.atomic_cas(fault, 0, blame, sem="relaxed", scope="gpu")


@triton.jit
def _now():
    """Nanoseconds."""
    return cuda.globaltimer()


@triton.jit
def _look(flag):
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [flag], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _signal(flag, number):
    """By one thread, after what all of the program's threads did before."""
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 t;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, 0;
        @p fence.acq_rel.sys;
        @p st.release.sys.global.u32 [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [flag, number],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
