"""Decode attention over sealed pages on Hopper GPUs: INT8 tensor cores on codes that lie as those want them.

For pages of 128 tokens with head dim 128 in every sealed format; `supports` says whether a shape is one of these. Everything
that varies from step to step is read on the device, so one captured launch serves any lengths that the plan's table holds.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from forefetch.kernels.attention.gluon.kernel import split_sealed
from forefetch.kernels.attention.gluon.merge import merge_parts
from forefetch.kernels.attention.sealed import SealedKv, SealedPlan
from forefetch.kernels.attention.triton import Scratch, merge
from forefetch.kernels.kv_codec.formats import KvFormat

ONE = 0x3C003C00  # 1.0 twice in float16

# Programs of a stream up to which the kernel is launched before the one before has ended. With 66 and 128 that is slower; why
# is open.
SOON = 32


class Fit(NamedTuple):
    """What a program takes of an SM: registers of a thread, how many programs are there at once; whether it takes long enough
    for looking for its share among all rows (columns are too quick)."""

    registers: int
    programs: int
    flat: bool


@dataclass(frozen=True)
class Costs:
    """What work counts for when it is cut into equal stretches: see `cut`."""

    start: int
    tile: int
    page: int
    least: int


FLAT = Costs(start=8, tile=4, page=16, least=16)


class Cut(NamedTuple):
    """How many programs share a stream, and how many of them take its float16 tokens and no pages (0: all take both); or, with
    `costs`, how many share all streams."""

    programs: int
    apart: int = 0
    costs: Costs | None = None


def supports(format: KvFormat, group: int, device: torch.device) -> bool:
    """Whether `decode_sealed` can read `format` for `group` query heads per KV head."""
    fits = format.head_dim == 128 and format.page == 128 and format.outliers in (0, 1, 2, 4) and format.thirds in (0, 32)
    return fits and group <= 8 and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def fit(format: KvFormat, group: int) -> Fit:
    """168 registers are the most for 3 programs on each quarter of an SM, 128 for 4. Heads as rows would spill at 128; `fp4`
    and `asym3` need too much shared memory."""
    light = group <= 4 and format.name not in ("fp4", "asym3")
    return Fit(128 if light else 168, 16 if light else 12, flat=group > 4 and format.name != "fp4")


def plan_cut(rows: int, kv_heads: int, max_pages: int, processors: int, programs: int, flat: bool) -> Cut:
    """Long work: one full wave (`programs` on each processor), so that all end together. Short work: 8 on each, because a
    program's start and its share of the merge cost as much as some pages. Where that is a page each, float16 tokens would take
    half of the time, so others do them. `flat`: whether long work of several rows is cut as one."""
    streams = rows * kv_heads
    if streams * max_pages >= 12 * programs * processors:
        if flat and rows > 1:
            return Cut(programs * processors, costs=FLAT)
        return Cut(max(1, programs * processors // streams))
    each = max(1, -(-streams * max_pages // (8 * processors)))
    apart = 3 if max_pages and streams * (max_pages + 3) <= 8 * processors else 0
    return Cut(max(1, -(-max_pages // each)) + apart, apart)


def plan_scratch(cut: Cut, rows: int, kv_heads: int, group: int, device: torch.device) -> Scratch:
    """What programs leave: as `triton.merge` wants it or, of all work cut as one line, `partial` [parts, G, 128] and `stats`
    [parts, G, 2], part i + s being program i's of stream s."""
    shape = (cut.programs + rows * kv_heads, group) if cut.costs else (rows, kv_heads * group, cut.programs)
    return Scratch(
        torch.empty((*shape, 128), dtype=torch.float32, device=device),
        torch.empty((*shape, 2), dtype=torch.float32, device=device),
    )


def decode_sealed(
    q: Tensor,
    kv: SealedKv,
    plan: SealedPlan,
    format: KvFormat,
    scale: float,
    out: Tensor | None = None,
    cut: Cut | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """q [B, Hq, 128] of any float type over sealed pages, tail and sinks -> [B, Hq, 128] in q's type.

    Queries are taken as float16. A row of length 0 comes out as zeros. `out`, `cut` and `scratch` are made when not given.
    """
    _check(q, kv, plan, format)
    rows, heads, _ = q.shape
    kv_heads, n_pages, _ = kv.pages.shape
    group = heads // kv_heads
    out, fitting = torch.empty_like(q) if out is None else out, fit(format, group)
    if cut is None:
        processors: int = torch.cuda.get_device_properties(q.device).multi_processor_count
        cut = plan_cut(rows, kv_heads, plan.page_table.shape[1], processors, fitting.programs, flat=fitting.flat)
    scratch = plan_scratch(cut, rows, kv_heads, group, q.device) if scratch is None else scratch
    split_sealed[(cut.programs, 1 if cut.costs else rows * kv_heads)](
        *(q, kv.pages.view(torch.int32), kv.pages.view(torch.float16), kv.pages),
        *(plan.page_table, plan.sealed, plan.lengths, plan.tail, kv.tail_k, kv.tail_v, kv.sink_k, kv.sink_v),
        *(scratch.partial, scratch.stats, scale * math.log2(math.e), _tables(format.name, q.device)),
        *(rows, cut.apart, ONE, n_pages, kv.tail_k.shape[1], plan.page_table.stride(0), q.stride(0), q.stride(1)),
        *(kv_heads, group, kv.tail_k.shape[2], format, cut.costs),
        num_warps=1,
        maxnreg=fitting.registers,
        launch_pdl=cut.costs is not None or cut.programs <= SOON,
    )
    if cut.costs:
        _merge_line(scratch, out, plan, cut, format, kv_heads)
    else:
        merge(scratch, out, soon=True)
    return out


def _merge_line(scratch: Scratch, out: Tensor, plan: SealedPlan, cut: Cut, format: KvFormat, kv_heads: int) -> None:
    """Joins the parts of all work cut as one line."""
    rows, heads, _ = out.shape
    streams, group = rows * kv_heads, heads // kv_heads
    expected = cut.programs // streams + 2  # of a stream, when rows are equal; more are joined one tile after another
    together = min(256, 1 << (expected - 1).bit_length())
    channels = 128 if together <= 16 else max(16, 2048 // together)  # all of these are one program's tile
    warps = 1 if together <= 8 else 4
    merge_parts[(streams, group, 128 // channels)](
        *(scratch.partial, scratch.stats, out, plan.sealed, plan.lengths, cut.programs, rows, out.stride(0), out.stride(1)),
        *(kv_heads, group, format, cut.costs, together, channels, warps),
        num_warps=warps,
        maxnreg=128,  # left to itself the compiler keeps to 64 registers and loads parts one after another
        launch_pdl=True,
    )


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
