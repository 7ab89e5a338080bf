"""Launches of the residency kernels: shapes checked, sizes rounded. Each fits a CUDA graph and reads nothing back."""

from __future__ import annotations

from typing import Literal

import torch
import triton
from torch import Tensor

from forefetch.kernels.gate.triton import choose_into
from forefetch.kernels.residency import naming
from forefetch.kernels.residency import triton as kernels
from forefetch.kernels.residency.state import MOST_TARGETS, Mover, Residents

FLOOR = 0.1  # a chance below this does not count as named
WORTH = 0.4  # a chance below this is not worth an expert's bytes: reading in place costs as many, and only if it is needed
SURE = 0.5  # an expert this likely is not evicted for another
PATIENCE = 128  # looks at a copy under way, about a microsecond each: as long as two int4 copies take
LEAST = 0.15  # share of recent calls from which a missed expert is brought in without being named
CROWD, FAST, SLOW, SHARE = 8, 0.2, 0.01, 0.3  # as in expert_worker/slots.py
_CHOSEN_INSIDE = 4  # tokens up to which `enter`'s one program also makes the choice
_PROGRAMS, _BLOCK = 32, 4096  # of `bring`: 16 KB each on the way at once fill PCIe beside what the layers read


def choose_and_enter(
    state: Residents,
    layer: int,
    logits: Tensor,
    ids: Tensor,
    weights: Tensor,
    rule: Literal["softmax_topk", "topk_softmax"],
    renormalise: bool,
    idle: Tensor | None = None,
) -> None:
    """The choice of experts from logits [T, E] into ids int32 and weights float32 [T, K], then `enter`.

    idle [T]: rows that are padding; their ids become -1."""
    if len(logits) > _CHOSEN_INSIDE:
        choose_into(logits, ids, weights, rule, renormalise)
        _enter(state, layer, ids, weights, None, False, idle)
    else:
        _enter(state, layer, ids, weights, logits, rule == "topk_softmax" or renormalise, idle)


def enter(state: Residents, layer: int, ids: Tensor, counters: Tensor | None = None, fault: Tensor | None = None) -> None:
    """Layer number `layer` (0 .. L - 1) needs the experts ids [T, K]: leaves where they are in state.rows [E].

    counters: where it is counted, unless with all others. fault int32 [1]: where it is not 0 nothing is done."""
    _enter(state, layer, ids, state.chance, None, False, None, counters, fault)


def _enter(
    state: Residents,
    layer: int,
    ids: Tensor,
    weights: Tensor,
    logits: Tensor | None,
    renormalise: bool,
    idle: Tensor | None,
    counters: Tensor | None = None,
    fault: Tensor | None = None,
) -> None:
    tokens, top_k = ids.shape
    if not ids.is_contiguous() or not 0 <= layer < state.layers or (logits is not None and logits.stride(1) != 1):
        raise ValueError(f"ids {tuple(ids.shape)} of layer {layer} of {state.layers}: contiguous rows and a layer are needed")
    if not tokens:
        return
    padded = max(32, triton.next_power_of_2(state.experts))
    kernels.enter[(1,)](
        *(state.chance if logits is None else logits, ids, weights, ids if idle is None else idle),
        state.active if fault is None else fault,
        *(state.table, state.coming, state.active, state.averages, state.chance, state.unused, state.counts, state.rows),
        *(
            state.counters if counters is None else counters,
            ids.numel(),
            0 if logits is None else logits.stride(0),
            state.first_slot,
            len(state.slots),
            layer,
            len(state.table),
        ),
        *(state.experts, padded, top_k, min(1024, max(32, triton.next_power_of_2(ids.numel())))),
        *(logits is not None, renormalise, idle is not None, fault is not None),
        *(PATIENCE if state.waits else 0, FLOOR, CROWD, FAST, SLOW),
        num_warps=1 if ids.numel() <= 128 else 4,
    )


def split(state: Residents, ids: Tensor, here: Tensor, absent: Tensor) -> None:
    """Behind `enter`: the ids [T, K] whose experts are in slots into `here`, the others into `absent`, -1 in their places."""
    if not all(part.is_contiguous() and part.shape == ids.shape for part in (ids, here, absent)):
        raise ValueError(f"ids {tuple(ids.shape)}: contiguous results of that shape are needed")
    block = min(1024, max(32, triton.next_power_of_2(ids.numel())))
    kernels.split[(triton.cdiv(ids.numel(), block),)](
        *(ids, state.rows, here, absent, ids.numel(), state.first_slot, len(state.slots), block), num_warps=1
    )


def note(state: Residents, first: int, experts: Tensor, probabilities: Tensor) -> None:
    """Heads name experts [D, T, M] with probabilities for the D layers from number `first` on."""
    targets, entries = len(experts), experts.numel()
    if experts.shape != probabilities.shape or not (experts.is_contiguous() and probabilities.is_contiguous()):
        raise ValueError(f"experts {tuple(experts.shape)}, probabilities {tuple(probabilities.shape)}: equal and contiguous")
    if not entries:
        return
    if targets > MOST_TARGETS:
        raise ValueError(f"heads name {targets} layers at a time; at most {MOST_TARGETS} are taken")
    naming.note[(1,)](
        *(experts, probabilities, state.chance, state.misses, entries, entries // targets, first, state.experts),
        *(max(32, triton.next_power_of_2(targets * state.experts)), min(1024, triton.next_power_of_2(entries))),
        num_warps=1,
    )


def spare(state: Residents, now: int, mover: Mover | None = None) -> None:
    """Leaves slots that `pick` at number `now` may empty; behind the `pick` before it. mover: who has the turn, where there are
    several."""
    kernels.spare[(1,)](
        *(state.coming, state.averages, state.chance, state.expert_in, state.spares, state.until),
        state.active if mover is None else mover.granted,
        *(len(state.slots), now, state.layers, len(state.table), state.experts),
        *(max(32, triton.next_power_of_2(len(state.slots))), state.candidates, SURE, SHARE, mover is not None),
        num_warps=8,
    )


def pick(state: Residents, now: int, targets: int, least: float = LEAST, mover: Mover | None = None) -> None:
    """Chooses at most `most_copies` experts to bring, of the `targets` layers behind number `now`, and which of the slots that
    `spare` found give way."""
    jobs, counters = (state.jobs, state.counters) if mover is None else (mover.jobs, mover.counters)
    kernels.pick[(1,)](
        *(state.table, state.coming, state.active, state.averages, state.chance, state.home, state.expert_in),
        *(state.unused, state.spares, state.until, jobs[now], counters),
        *(state.active if mover is None else mover.granted, state.first_slot, len(state.slots)),
        *(now, now + 1, targets, state.layers, len(state.table), least, state.experts),
        *(max(32, triton.next_power_of_2(state.experts)), 4, state.candidates, state.most_copies, WORTH, SURE, SHARE),
        mover is not None,
        num_warps=4,
    )


def bring(state: Residents, now: int, mover: Mover | None = None) -> None:
    """Copies what `pick` chose at number `now`. Calls follow one another; a later layer's `pick` may run meanwhile."""
    words = state.base.view(torch.int32)
    jobs, granted = (state.jobs, state.active) if mover is None else (mover.jobs, mover.granted)
    kernels.bring[(_PROGRAMS,)](
        *(words, state.table, state.home, state.coming, jobs[now], state.arrived, granted, state.first_slot, state.stride // 4),
        *(_PROGRAMS, state.most_copies, _BLOCK, mover is not None),
        num_warps=8,
    )
