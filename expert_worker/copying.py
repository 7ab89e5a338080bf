"""How an expert gets from host memory into a slot: in the calling thread, or on a GPU's stream beside the computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from expert_worker.host import Host
from expert_worker.pool import Pool
from expert_worker.residency import CopyFailed, StartCopy, Wait
from forefetch.kernels import compiled

if TYPE_CHECKING:
    from forefetch.kernels.compiled.unpack import Copies


def compiled_copies(pool: Pool, host: Host) -> Copies | None:
    """From where to where copies go, for compiled kernels; None when those are not there or do not know the format."""
    format = host.format
    if pool.memory.is_cuda or not compiled.available() or format.order != "natural":
        return None
    from forefetch.kernels.compiled import unpack

    kinds = {"float16": unpack.HALF, "int8": unpack.INT8, "int4": unpack.INT4}
    if format == pool.format:
        kind: int | None = unpack.SAME
    else:
        kind = kinds.get(format.kind) if pool.dtype == torch.float32 else None
    if kind is None:
        return None
    where = host.blobs.data_ptr(), host.stride, pool.memory.data_ptr(), pool.stride
    groups = format.group_of(pool.hidden), format.group_of(pool.width)
    return unpack.Copies(*where, kind, pool.hidden, pool.width, *groups)


class Lane:
    """How an expert gets into a slot: in this thread on a CPU, on a stream beside the computation on a GPU."""

    def __init__(self, pool: Pool, host: Host, check: bool) -> None:
        self._pool, self._host, self._check = pool, host, check
        self._stream = torch.cuda.Stream(pool.memory.device) if pool.memory.is_cuda else None  # type: ignore[no-untyped-call]
        self._used: dict[int, torch.cuda.Event] = {}  # slot -> when the computation has read it
        self.copies = compiled_copies(pool, host)
        if self.copies is not None:
            from forefetch.kernels.compiled.locks import compiling
            from forefetch.kernels.compiled.unpack import fill_call

            self._fill = cast("Callable[[Copies, int, int], None]", fill_call)
            with compiling():
                self._fill(self.copies, 0, 0)
        self.start: StartCopy = self._start if self._stream is None else self._launch

    def _start(self, slot: int, number: int) -> Wait:
        self._bring(slot, number)
        self._verify(slot, number)
        return _nothing

    def _bring(self, slot: int, number: int) -> None:
        if self.copies is not None:
            self._fill(self.copies, self._host.place_of(number), slot)
        else:
            self._pool.fill(slot, self._host.blob(number), self._host.format)

    def _launch(self, slot: int, number: int) -> Wait:
        assert self._stream is not None
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            if slot in self._used:
                self._stream.wait_event(self._used.pop(slot))
            self._pool.fill(slot, self._host.blob(number), self._host.format)
            done.record(self._stream)

        def wait() -> None:
            done.synchronize()
            self._verify(slot, number)

        return wait

    def used(self, slots: Sequence[int]) -> None:
        """The computation launched so far reads these slots: nothing may be written to them before it is done."""
        if self._stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._used.update(dict.fromkeys(slots, event))

    def _verify(self, slot: int, number: int) -> None:
        if self._check and self._pool.differs(slot, self._host, number):
            raise CopyFailed("a slot does not hold what host memory says")


def _nothing() -> None:
    pass
