"""Copies into slots by compiled kernels: the same bits as by definition, and each job done exactly once whoever does it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from forefetch.kernels import compiled
from forefetch.kernels.grouped_mlp.formats import ExpertFormat, Kind, blob_bytes, pack, unpack

pytestmark = pytest.mark.skipif(not compiled.available(), reason="Numba is not installed")
if compiled.available():
    from expert_worker.slots import Slots
    from forefetch.kernels.compiled import copier
    from forefetch.kernels.compiled.atomics import get
    from forefetch.kernels.compiled.copier import PLACES
    from forefetch.kernels.compiled.toolchain import compiled as decorated
    from forefetch.kernels.compiled.toolchain import entry
    from forefetch.kernels.compiled.unpack import HALF, INT4, INT8, SAME, Copies
    from forefetch.kernels.compiled.unpack import fill_call as fill
    from forefetch.kernels.compiled.unpack import widened as widened_part

    claim, coming, ended, give_up = map(entry, (copier.claim, copier.coming, copier.ended, copier.give_up))
    offer, pending, settle, widened = map(entry, (copier.offer, copier.pending, copier.settle, widened_part))

    @entry
    @decorated()
    def helping(jobs, copies, over):  # type: ignore[no-untyped-def]
        """A helper that does nothing else."""
        while not get(over):
            copier.help_copying(jobs, copies)


FORMATS: list[tuple[Kind, str]] = [
    ("bfloat16", "bfloat16"),
    ("float32", "float32"),
    ("float16", "float32"),
    ("int8", "float32"),
    ("int4", "float32"),
]


def copies_of(blobs: torch.Tensor, pool: torch.Tensor, kind: str, into: str, hidden: int, width: int) -> Copies:
    code = SAME if kind == into else {"float16": HALF, "int8": INT8, "int4": INT4}[kind]
    groups = (ExpertFormat(kind).group_of(inputs) for inputs in (hidden, width))  # type: ignore[arg-type]
    return Copies(blobs.data_ptr(), blobs.stride(0), pool.data_ptr(), pool.stride(0), code, hidden, width, *groups)


@pytest.mark.parametrize(("kind", "into"), FORMATS)
@pytest.mark.parametrize(("hidden", "width"), [(256, 64), (48, 20), (64, 192)])
def test_a_filled_slot_is_what_unpack_gives_and_its_neighbours_stay(kind: Kind, into: str, hidden: int, width: int) -> None:
    draw = torch.Generator().manual_seed(hidden)
    matrices = [(torch.randn(2 * width, hidden, generator=draw), torch.randn(hidden, width, generator=draw)) for _ in range(3)]
    matrices[1][0][0, :] *= 1e-6  # a scale that float16 holds as a subnormal number
    format, dtype = ExpertFormat(kind), getattr(torch, into)
    blobs = torch.stack([pack(*pair, format) for pair in matrices])
    pool = torch.full((4, blob_bytes(hidden, width, ExpertFormat(into))), 255, dtype=torch.uint8)  # type: ignore[arg-type]
    fill(copies_of(blobs, pool, kind, into, hidden, width), 1, 2)
    w13, w2 = unpack(blobs[1], hidden, width, format, dtype)
    elements, half = pool[2].view(dtype), 2 * width * hidden
    assert torch.equal(elements[:half].view(hidden, 2 * width).t(), w13)
    assert torch.equal(elements[half : half + width * hidden].view(width, hidden).t(), w2)
    assert (pool[[0, 1, 3]] == 255).all()


def test_every_float16_becomes_its_float32() -> None:
    halves = np.arange(2**16, dtype=np.uint16)
    expected = halves.view(np.float16).astype(np.float32)
    found = np.array([widened(half) for half in halves], dtype=np.float32)
    numbers = ~np.isnan(expected)
    assert np.array_equal(found.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])
    assert np.isnan(found[~numbers]).all()


def test_two_threads_do_every_job_once() -> None:
    """The ring goes round some fifty times, while the engine's side takes back, gives up and waits at random."""
    draw, experts = np.random.default_rng(0), 3 * PLACES
    blobs = torch.arange(experts, dtype=torch.int32)[:, None].expand(experts, 24 * 20 * 20).contiguous().view(torch.uint8)
    slots, width = Slots(2 * PLACES, [experts]), 20
    pool = torch.zeros(2 * PLACES, blobs.shape[1], dtype=torch.uint8)
    copies = copies_of(blobs, pool, "float32", "float32", blobs.shape[1] // (12 * width), width)
    jobs, table = copier.Jobs(*np.zeros((4, PLACES), dtype=np.int64), np.zeros(copier.NUMBERS, dtype=np.int64)), slots.table
    over, done = np.ones(1, dtype=np.int64), 0
    helping(jobs, copies, over.ctypes.data)  # compiled, it ends at once
    over[0] = 0
    thread = threading.Thread(target=helping, args=(jobs, copies, over.ctypes.data))
    thread.start()
    for _ in range(400):
        posted = []
        for expert in draw.permutation(experts)[: draw.integers(1, 20)].tolist():
            if slots.slot_of[expert] < 0 and pending(jobs) < PLACES and slots.place(expert) >= 0:
                offer(jobs, expert, slots.slot_of[expert])
                posted.append(expert)
        for expert in posted[: draw.integers(0, 4)]:
            if coming(table, expert):
                at = claim(jobs, expert)  # as who takes an item does: it brings in what nobody began, or waits
                if at < 0:
                    fill(copies, expert, slots.slot_of[expert])
                    slots.filled(expert)
                else:
                    ended(jobs, at)
                    settle(jobs, copies, table)
            assert slots.is_ready(expert)
        if draw.random() < 0.5:
            give_up(jobs, copies, table, False)
            assert pending(jobs) == 0
        settle(jobs, copies, table)
        done += len(posted)
        for expert, slot in enumerate(slots.slot_of):
            assert slot < 0 or not slots.is_ready(expert) or (pool[slot].view(torch.int32) == expert).all()
    give_up(jobs, copies, table, False)
    assert done > 5 * PLACES
    assert not jobs.word.any()
    assert jobs.numbers[copier.BYTES] <= done * blobs.shape[1]
    assert jobs.numbers[copier.WAITING] == 0
    over[0] = 1
    thread.join()
