"""The grouped MLP for a CUDA graph: routing, both products and the sum, all on the device.

Launch shapes follow from the number of tokens alone, experts are found through `slot_of` (address = pool + slot * stride), and
nothing is read back. So a captured call stays valid while experts come and go, and a graph per bucket of tokens is enough.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from forefetch.kernels.grouped_mlp.launches import Call, run_portable
from forefetch.kernels.grouped_mlp.scratch import MoeScratch
from forefetch.kernels.grouped_mlp.unsummed import Unsummed

Rule = Literal["softmax_topk", "topk_softmax"]


def moe(x: Tensor, ids: Tensor, weights: Tensor, pool: Tensor, slot_of: Tensor, out: Tensor, scratch: MoeScratch) -> None:
    """out [T, H] = for each token the weighted sum of its experts' MLPs; no host synchronisation, fit for CUDA graphs.

    x [T, H] of scratch's type, ids [T, K] int32 or int64 (distinct in a row), weights [T, K] float32, pool uint8 [S, stride] of
    `formats` blobs, slot_of int32 [E], out [T, H] of any float type. Ids < 0 and experts whose slot is < 0 add nothing. Sums
    are float32 in a fixed order: a call repeats bit for bit, and a row's result does not depend on the others.
    ValueError for shapes, types and strides that do not fit.
    """
    _check(x, pool, slot_of, out, scratch)
    tokens, top_k = len(x), scratch.top_k
    if ids.shape != (tokens, top_k) or weights.shape != ids.shape or weights.dtype != torch.float32:
        raise ValueError(f"ids {tuple(ids.shape)} and weights {tuple(weights.shape)} {weights.dtype} for {tokens} x {top_k}")
    if ids.dtype not in {torch.int32, torch.int64} or not (ids.is_contiguous() and weights.is_contiguous()):
        raise ValueError("ids must be contiguous integers, weights contiguous")
    if tokens:
        _run(Call(x, ids, weights, None, False, pool, slot_of, out, scratch))


def moe_from_logits(
    x: Tensor, logits: Tensor, rule: Rule, renormalise: bool, pool: Tensor, slot_of: Tensor, out: Tensor, scratch: MoeScratch
) -> None:
    """`moe` with the choice of experts inside: logits [T, E] of any float type, as `gate.choose` with ties to the lower index.

    The choice is left in `scratch.ids` and `scratch.weights`, the first T * K entries of each.
    """
    _check(x, pool, slot_of, out, scratch)
    _check_logits(x, logits, scratch)
    if len(x):
        sums = rule == "topk_softmax" or renormalise
        _run(Call(x, scratch.ids, scratch.weights, logits, sums, pool, slot_of, out, scratch))


def unsummed_from_logits(
    x: Tensor, logits: Tensor, rule: Rule, renormalise: bool, pool: Tensor, slot_of: Tensor, scratch: MoeScratch
) -> Unsummed:
    """`moe_from_logits` without its last kernel, the sum over a token's experts: `kernels.norm` adds them up, and must before
    the next call with this scratch, because it also leaves the counters at zero. x must have rows."""
    _check(x, pool, slot_of, x, scratch)
    _check_logits(x, logits, scratch)
    _run(Call(x, scratch.ids, scratch.weights, logits, rule == "topk_softmax" or renormalise, pool, slot_of, None, scratch))
    return scratch.unsummed(len(x))


def _check_logits(x: Tensor, logits: Tensor, scratch: MoeScratch) -> None:
    if logits.shape != (len(x), scratch.experts) or logits.stride(1) != 1:
        raise ValueError(f"logits {tuple(logits.shape)} for {len(x)} tokens and {scratch.experts} experts")


def _check(x: Tensor, pool: Tensor, slot_of: Tensor, out: Tensor, scratch: MoeScratch) -> None:
    if x.ndim != 2 or x.shape[1] != scratch.hidden or len(x) > scratch.tokens or x.dtype != scratch.dtype:
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} does not fit scratch of {scratch.tokens} x {scratch.hidden} {scratch.dtype}"
        )
    if out.shape != x.shape or x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"out {tuple(out.shape)} for x {tuple(x.shape)}; rows of both must be contiguous")
    if pool.dtype != torch.uint8 or pool.ndim != 2 or pool.stride(1) != 1 or pool.shape[1] < scratch.blob_bytes:
        raise ValueError(f"pool {tuple(pool.shape)} {pool.dtype} has no slots of {scratch.blob_bytes} bytes")
    if pool.stride(0) % 16 or pool.data_ptr() % 16:
        raise ValueError("slots must begin at multiples of 16 bytes")
    if slot_of.shape != (scratch.experts,) or slot_of.dtype != torch.int32 or not slot_of.is_contiguous():
        raise ValueError(f"slot_of {tuple(slot_of.shape)} {slot_of.dtype} for {scratch.experts} experts")


def _run(call: Call) -> None:
    if call.scratch.format.order != "fragment":
        run_portable(call)
    else:
        from forefetch.kernels.grouped_mlp import fragment  # loads Gluon

        fragment.run(call)
