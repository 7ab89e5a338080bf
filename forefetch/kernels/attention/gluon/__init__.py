"""Decode attention over sealed pages on Hopper GPUs: INT8 tensor cores on codes that lie as those want them.

For pages of 128 tokens with head dim 128 in every sealed format; `supports` says whether a shape is one of these. Everything
that varies from step to step is read on the device, so one captured launch serves any lengths that the plan's table holds.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from forefetch.kernels.attention.gluon.kernel import split_sealed
from forefetch.kernels.attention.sealed import SealedKv, SealedPlan
from forefetch.kernels.attention.triton import Scratch, merge
from forefetch.kernels.kv_codec.formats import KvFormat

ONE = 0x3C003C00  # 1.0 twice in float16

# Splits up to which the kernel is launched before the one before has ended. With 66 and 128 that is slower; why is open.
SOON = 32


class Fit(NamedTuple):
    """What a program takes of an SM: registers of a thread, and how many programs are there at once."""

    registers: int
    programs: int


class Split(NamedTuple):
    """How many programs share a row and KV head, and how many take its float16 tokens and no pages (0: all take both)."""

    programs: int
    apart: int


def supports(format: KvFormat, group: int, device: torch.device) -> bool:
    """Whether `decode_sealed` can read `format` for `group` query heads per KV head."""
    fits = format.head_dim == 128 and format.page == 128 and format.outliers in (0, 1, 2, 4) and format.thirds in (0, 32)
    return fits and group <= 8 and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def fit(format: KvFormat, group: int) -> Fit:
    """168 registers are the most for 3 programs on each quarter of an SM, 128 for 4. Heads as rows would spill at 128; `fp4`
    and `asym3` need too much shared memory."""
    return Fit(128, 16) if group <= 4 and format.name not in ("fp4", "asym3") else Fit(168, 12)


def plan_split(rows: int, kv_heads: int, max_pages: int, processors: int, programs: int) -> Split:
    """Long work: one full wave (`programs` on each processor), so that all end together. Short work: 8 on each, because a
    program's start and its share of the merge cost as much as some pages. Where that is a page each, float16 tokens would take
    half of the time, so others do them."""
    streams = rows * kv_heads
    if streams * max_pages >= 12 * programs * processors:
        return Split(max(1, programs * processors // streams), 0)
    each = max(1, -(-streams * max_pages // (8 * processors)))
    apart = 3 if max_pages and streams * (max_pages + 3) <= 8 * processors else 0
    return Split(max(1, -(-max_pages // each)) + apart, apart)


def _scratch(rows: int, heads: int, splits: int, device: torch.device) -> Scratch:
    return Scratch(
        torch.empty((rows, heads, splits, 128), dtype=torch.float32, device=device),
        torch.empty((rows, heads, splits, 2), dtype=torch.float32, device=device),
    )


def decode_sealed(
    q: Tensor,
    kv: SealedKv,
    plan: SealedPlan,
    format: KvFormat,
    scale: float,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
    apart: int = 0,
) -> Tensor:
    """q [B, Hq, 128] of any float type over sealed pages, tail and sinks -> [B, Hq, 128] in q's type.

    Queries are taken as float16. A row of length 0 comes out as zeros. `out` and `scratch` are made when not given; `apart`
    (`Split`) comes with a given `scratch`.
    """
    _check(q, kv, plan, format)
    rows, heads, _ = q.shape
    kv_heads, n_pages, _ = kv.pages.shape
    out, fitting = torch.empty_like(q) if out is None else out, fit(format, heads // kv_heads)
    if scratch is None:
        processors: int = torch.cuda.get_device_properties(q.device).multi_processor_count
        split = plan_split(rows, kv_heads, plan.page_table.shape[1], processors, fitting.programs)
        scratch, apart = _scratch(rows, heads, split.programs, q.device), split.apart
    split_sealed[(scratch.splits, rows * kv_heads)](
        *(q, kv.pages.view(torch.int32), kv.pages.view(torch.float16), kv.pages),
        *(plan.page_table, plan.sealed, plan.lengths, plan.tail, kv.tail_k, kv.tail_v, kv.sink_k, kv.sink_v),
        *(scratch.partial, scratch.stats, scale * math.log2(math.e)),
        *(_tables(format.name, q.device), apart, ONE, n_pages, kv.tail_k.shape[1]),
        *(plan.page_table.stride(0), q.stride(0), q.stride(1)),
        *(kv_heads, heads // kv_heads, kv.tail_k.shape[2], format),
        num_warps=1,
        maxnreg=fitting.registers,
        launch_pdl=scratch.splits <= SOON,
    )
    merge(scratch, out, soon=True)
    return out


def level_bytes(format: KvFormat) -> tuple[int, int]:
    """The four levels of 2-bit codes, a byte each, as signed 32-bit numbers: without and with a third bit (`asym3`). `fp4`: the
    upper bytes of its eight magnitudes as float16, whose lower ones are 0."""
    third = int(format.name == "asym3")
    tables = [[(level + way) & 255 for level in format.levels[:4]] for way in (-third, third)]
    if format.name == "fp4":
        upper = [struct.pack(">e", level)[0] for level in format.levels[:8]]
        tables = [upper[:4], upper[4:]]
    low, high = (int.from_bytes(bytes(table), "little", signed=True) for table in tables)
    return low, high


@lru_cache
def _tables(name: str, device: torch.device) -> Tensor:
    """`level_bytes` on the device, for each lane: int32 [2, 32]."""
    low, high = level_bytes(KvFormat(name, thirds=16 if name == "mixed" else 0))
    return torch.tensor([[low] * 32, [high] * 32], dtype=torch.int32, device=device)


def _check(q: Tensor, kv: SealedKv, plan: SealedPlan, format: KvFormat) -> None:
    """Shapes and strides that the kernel relies on."""
    if not supports(format, q.shape[1] // kv.pages.shape[0], q.device):
        raise ValueError(f"no kernel for {format} on {q.device} with {q.shape[1]} heads over {kv.pages.shape[0]}")
    if q.shape[1] % kv.pages.shape[0] or q.shape[2] != 128 or q.stride(2) != 1 or q.stride(1) % 8:
        raise ValueError(f"queries {tuple(q.shape)} of strides {q.stride()} do not fit {kv.pages.shape[0]} KV heads of 128")
    if kv.pages.shape[2] != format.blob_bytes or kv.sink_k.shape[2] != format.sinks or kv.tail_k.shape[2] < format.tail_tokens:
        raise ValueError("pages, sinks or tail are not of this format")
    parts = (kv.pages, kv.tail_k, kv.tail_v, kv.sink_k, kv.sink_v, plan.sealed, plan.lengths, plan.tail)
    if not all(part.is_contiguous() for part in parts) or plan.page_table.stride(1) != 1:
        raise ValueError("pages, tails, sinks and plan must be contiguous")
