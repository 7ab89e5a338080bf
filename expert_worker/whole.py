"""All of a model's experts in this process, for a router that evaluates whole steps on a CPU; in slots, or on their way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import add

import numpy as np
import numpy.typing as npt
import torch

from expert_worker.core import Core
from expert_worker.experts import Experts
from expert_worker.residency import Residency
from expert_worker.slots import Slots
from forefetch.kernels.compiled import copier, slots, unpack, visit
from forefetch.kernels.compiled.step import Experts as Room
from forefetch.kernels.grouped_mlp.cpu import KINDS
from forefetch.wire import Verified

NO_COPIES = unpack.Copies(*[0] * len(unpack.Copies._fields))
"""Where nothing moves."""


class WholeExperts:
    """Beside `Core.forward`, not at the same time: evaluates nothing itself, says where everything is and keeps the counts."""

    def __init__(self, core: Core, experts: Experts) -> None:
        self._core, self._experts, self._residency = core, experts, experts.residency
        expert, slot, ns, word = np.zeros((4, copier.PLACES), dtype=np.int64)
        self._jobs = copier.Jobs(expert, slot, ns, word, np.zeros(copier.NUMBERS, dtype=np.int64))
        self._before = np.zeros(3, dtype=np.int64)  # the ends of the last step: see `verified`
        self._counted = np.zeros(2, dtype=np.int64)  # bytes and ns of copies by compiled steps that residency knows of

    @staticmethod
    def of(core: Core) -> WholeExperts | None:
        """None when experts come and go, when some are elsewhere, or when the kernels do not take them."""
        experts = core.experts
        if type(experts) is not Experts or experts.shelf is not None or experts.checks_copies:
            return None
        kept, computed = experts.pool.memory, core.info.dtype.itemsize == 4
        fits = computed and not kept.is_cuda and experts.pool.dtype in KINDS and bool((experts.numbers >= 0).all())
        fits = fits and (experts.residency is None or experts.lane.copies is not None)
        return WholeExperts(core, experts) if fits else None

    def room(self, rows: int) -> Room:
        """The addresses of the experts, and memory for steps of up to so many rows."""
        experts, weights = self._experts, self._experts.pool.weights
        w13, w2 = weights.w13, weights.w2
        number = experts.numbers.astype(np.int64)
        pairs, size = rows * experts.top_k, w13.element_size()
        shapes = (pairs, 2 * weights.width), (pairs, weights.width), (pairs, weights.hidden)
        hidden, active, result = (np.zeros(shape, dtype=np.float32) for shape in shapes)
        return Room(
            pool=w13.data_ptr(),
            strides=np.array((w13.stride(0) * size, w2.data_ptr() - w13.data_ptr())),
            kind=int(KINDS[w13.dtype]),
            number=number,
            load=experts.load,
            rows=np.zeros(pairs, dtype=np.int64),
            place=np.zeros(pairs, dtype=np.int64),
            first=np.zeros(number.shape[1] + 1, dtype=np.int64),
            begins=np.arange(rows) * experts.top_k,
            groups=np.zeros(number.shape[1], dtype=np.int64),
            slots=np.zeros(number.shape[1], dtype=np.int64),
            hidden=hidden,
            active=active,
            result=result,
        )

    def moving(self, layers: int, threads: int) -> visit.Moving:
        """What steps of a model with so many layers need, by so many threads, when there are fewer slots than experts."""
        residency, count = self._residency, self._experts.numbers.shape[1]
        lane = self._experts.lane if residency else None
        named, needs, ways, how, spent = np.zeros((5, count), dtype=np.int64)
        copies = lane.copies if lane and lane.copies else NO_COPIES
        once = torch.zeros((threads if copies.kind != unpack.SAME else 0, copies.stride), dtype=torch.uint8)
        return visit.Moving(
            any=residency is not None,
            table=residency.slots.table if residency else Slots(1, [1]).table,
            copies=copies,
            jobs=self._jobs,
            hinted=np.zeros(len(self._experts.members), dtype=bool),
            named=named,
            counts=np.zeros((layers, visit.COUNTS), dtype=np.int64),
            needs=needs,
            ways=ways,
            how=how,
            spent=spent,
            uses=np.zeros(count),
            once=once.numpy(),
        )

    @contextmanager
    def still(self, step: int) -> Iterator[None]:
        """A context for a compiled step: nobody else moves experts, and hints for it or earlier ones are stale."""
        if self._residency is None:
            yield
            return
        with self._residency.still():
            self._residency.lent = False  # the step takes the slots back first thing
            self._residency.prefetcher.arrived("", step, len(self._experts.layers))
            yield

    def lend(self) -> bool:
        """Lends helpers all slots until the next `still` or `take_back`; False if that cannot be just now."""
        return self._residency is not None and self._residency.lend()

    def take_back(self) -> None:
        """The slots' own threads may go on."""
        if self._residency is not None:
            self._residency.take_back()

    def verified(self, moving: visit.Moving, out: npt.NDArray[np.int64]) -> None:
        """Fills out [L, 8] after a step: hits, late, misses, resident, wasted and copied bytes, time of copies, and of waiting
        for them. Copies that only ended with the step are the last layer's."""
        jobs = self._jobs.numbers
        ends = np.array((moving.table.numbers[slots.WASTED], jobs[copier.BYTES], jobs[copier.SPENT_NS]))
        out[:, :4] = moving.counts[:, : visit.RESIDENT + 1]
        visit.account(moving.counts, ends, self._before, out)  # type: ignore[no-untyped-call]
        out[:, 4] *= self._experts.host.stride if self._experts.host else 0

    def evaluated(self, calls: int, rows: int, pairs: int, compute_ns: int, copy_wait_ns: int, found: npt.ArrayLike) -> None:
        """Counts a step: its layers, rows and pairs of each, and of all its distinct experts how many were hits, late, misses,
        resident."""
        core = self._core
        core.calls += calls
        core.rows += calls * rows
        core.pairs += calls * pairs
        core.compute_ns += compute_ns
        core.copy_wait_ns += copy_wait_ns
        moved = self._moved(self._residency) if self._residency else (0, 0, 0)
        core.verified = Verified(*map(add, core.verified, (*np.asarray(found).tolist(), *moved, 0)))

    def _moved(self, residency: Residency) -> tuple[int, int, int]:
        """Tells residency what the step copied; what was wasted and copied since the last time, by whom ever."""
        totals = self._jobs.numbers[[copier.BYTES, copier.SPENT_NS]]
        size, ns = (totals - self._counted).tolist()
        self._counted = totals
        residency.copied.bytes += size
        residency.copied.ns += ns
        return residency.since_last()
