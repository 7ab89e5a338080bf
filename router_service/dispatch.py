"""Rows of a layer to the workers that hold their experts, and back: one frame per worker with rows, never one per expert.

The choice of experts is brought to the host here (on a GPU: the layer's one synchronisation), split by owner, and each
worker gets only the rows it has an expert for. Workers apply the gate weights, so one row per token and worker returns;
they are added in worker order, which makes the sum repeatable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from expert_worker.client import Link
from forefetch.errors import ForefetchError, LinkDown
from forefetch.telemetry.ring import StepStamps
from forefetch.wire import LayerCall, LayerReply
from router_service.batch import StepBatch
from router_service.workers import Worker, Workers

R = TypeVar("R")
Ints = npt.NDArray[np.int64]


@dataclass
class Sent:
    """A call that waits for its reply. `rows`: which rows of the step it carries; None: all of them, in order."""

    worker: Worker
    link: Link
    rows: torch.Tensor | None
    count: int


class Dispatch:
    """`timeout_s` bounds the wait for one worker in one layer."""

    def __init__(self, workers: Workers, timeout_s: float) -> None:
        self.workers, self.timeout_s = workers, timeout_s
        self.chosen: Ints = np.empty((0, 0), dtype=np.int64)  # [T, K] of the last send, without padding
        self._sent: deque[list[Sent]] = deque()  # by send, oldest first: one, or two of a step in halves
        self._load = np.zeros_like(workers.load)  # [L, E] pairs of the step under way

    def begin(self) -> None:
        """A step begins. What one that broke off has counted is forgotten: it runs again. What one that a defect ended has left
        with workers is taken back."""
        self._load.fill(0)
        self._settle()

    def commit(self) -> None:
        """The step has ended well: its pairs count."""
        self.workers.load += self._load

    def send(self, batch: StepBatch, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """x [T, H], ids [T, K], weights [T, K] f32: submits each worker's rows. LinkDown when a link breaks.

        Where links are twins, a second time before `add`, which takes the older one's replies.
        """
        self._sent.append([])
        host_ids, host_weights = _to_host(ids[: batch.tokens], weights[: batch.tokens])
        self.chosen = host_ids
        owner = self._owners(layer, host_ids)
        for worker in self.workers.rows:
            row, column = np.nonzero(owner == worker.index)
            if not row.size:
                continue
            if worker.link is None:
                self._abandon(worker.index, worker.reason)
            rows, pair_row = _compact(row, batch.tokens)
            index = None if rows is None else torch.from_numpy(rows).to(x.device)
            picked = x[: batch.tokens] if index is None else x[index]
            call = LayerCall(
                batch.step,
                layer,
                picked,
                pair_row.astype(np.int32),
                host_ids[row, column].astype(np.int32),
                host_weights[row, column],
                batch.trace,
            )
            self._submit(worker, call, index)

    def _owners(self, layer: int, ids: Ints) -> Ints:
        """ids [T, K] -> the workers [T, K] that evaluate these pairs. Counts them."""
        owners = self.workers.owners
        self._load[layer] += np.bincount(ids.ravel(), minlength=self._load.shape[1])
        turn = 0 if len(owners) == 1 else (np.arange(len(ids))[:, None] + ids) % len(owners)
        found: Ints = owners[turn, layer, ids]
        return found

    def _submit(self, worker: Worker, call: LayerCall, rows: torch.Tensor | None) -> None:
        link = worker.link
        assert link is not None
        sent = Sent(worker, link, rows, call.form.sizes[0])
        self._guard(worker, lambda: link.submit(call))
        self._sent[-1].append(sent)
        worker.calls += 1
        worker.pairs += call.form.sizes[2]

    def add(self, out: torch.Tensor, layer: int, stamps: StepStamps) -> int:
        """Waits for the outstanding replies and adds their rows to out [T, H]. LinkDown when a worker is lost.

        Returns the longest time that a worker reports for its part, nanoseconds.
        """
        slowest, oldest = 0, self._sent[0]
        while oldest:
            sent = oldest.pop(0)
            reply = self._guard(sent.worker, lambda link=sent.link: link.collect(self.timeout_s))  # type: ignore[misc]
            self._add_rows(out, sent, reply)
            parts = (reply.queue_ns, reply.copy_wait_ns, reply.compute_ns)
            stamps.call(layer, sent.worker.index, sent.count, reply.round_trip_ns, *parts)
            found = reply.verified
            stamps.verified(layer, sent.worker.index, *found)
            sent.worker.copies |= bool(found.hits or found.late or found.misses)
            slowest = max(slowest, sum(parts))
        self._sent.popleft()
        return slowest

    def _add_rows(self, out: torch.Tensor, sent: Sent, reply: LayerReply) -> None:
        rows = reply.rows.to(device=out.device, dtype=out.dtype)
        if sent.rows is None:
            out[: sent.count] += rows
        else:
            out.index_add_(0, sent.rows, rows)

    def _guard(self, worker: Worker, action: Callable[[], R]) -> R:
        """Runs a link's action; on any error settles the other links first, so that the next step starts clean."""
        try:
            return action()
        except LinkDown as error:
            self._sent = deque([sent for sent in each if sent.worker is not worker] for each in self._sent)
            self._abandon(worker.index, str(error))
            raise AssertionError("unreachable") from error
        except ForefetchError:
            self._settle()
            raise

    def _abandon(self, index: int, reason: str) -> None:
        self._settle()
        self.workers.lost(index, reason)
        raise LinkDown(index, f"worker {self.workers.rows[index].address}: {reason}")

    def _settle(self) -> None:
        """Reads and drops the replies that are still due; a link that cannot deliver is lost as well."""
        outstanding = list(chain.from_iterable(self._sent))
        self._sent.clear()
        for sent in outstanding:
            if sent.worker.link is not sent.link:
                continue  # lost by now
            try:
                sent.link.collect(self.timeout_s)
            except ForefetchError as error:
                self.workers.lost(sent.worker.index, str(error))


def _to_host(ids: torch.Tensor, weights: torch.Tensor) -> tuple[Ints, npt.NDArray[np.float32]]:
    """ids, weights [T, K] as numpy arrays, over one transfer when they are on a device (ids are exact in float32)."""
    if ids.device.type == "cpu":
        return ids.numpy(), weights.numpy()
    both = torch.stack((ids.float(), weights)).cpu().numpy()
    return both[0].astype(np.int64), both[1]


def _compact(row: Ints, tokens: int) -> tuple[Ints | None, Ints]:
    """Ascending row numbers of pairs -> (distinct rows, or None when that is every row; each pair's index into them)."""
    first = np.empty(row.size, dtype=bool)
    first[0] = True
    np.not_equal(row[1:], row[:-1], out=first[1:])
    rows = row[first]
    if rows.size == tokens:
        return None, row
    return rows, np.cumsum(first) - 1
