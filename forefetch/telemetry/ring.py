"""Where the time of each step went, written by the engine thread at the cost of a few bytes each, read by anybody.

A ring of `capacity` steps, allocated once: 8 * (8 + 16 layers + 13 layers workers) bytes a step, so 48 layers with 2 workers
and 1024 steps take 15 MB. A stamp (`layer`, `call`) is one `struct.pack_into`: 0.20 us on the 2-core test machine; `begin`
takes 1.4 us and `finish`, which adds the parts up with numpy, 26 us a step.

With lookahead a layer also has the time of its heads and what became of their hints.

One thread writes. Readers take no lock: each slot has a version that is odd while its step is being written, and a reader
that sees it odd, changed or of another step gets None, never a mixture. Durations are nanoseconds.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]

_HEADER = 8  # version, step, start, end, head, sampling, batch, tokens
_RECORD = 5  # layer: start, attention, gate, experts, combine; call: rows, round trip, queue, copy wait, compute
_HINTS = 2 + 9  # layer: lookahead, hidden; then HINT_COUNTS
_VERIFIED = 8  # call: hits, late, misses, resident, wasted bytes, copied bytes, time of copies, shadowed
_WORD = 8
HINT_COUNTS = (
    *("chosen", "named", "found"),
    *(f"{kind}_{count}" for kind in ("next", "second", "refined") for count in ("named", "found")),
)
"""What a layer's hints are counted by: distinct experts that the step's rows chose (where anything had been named), that were
named for it in time, and both; then named and found by hints from the layer before, from two before, and refined ones."""

VERIFIED = ("hits", "late", "misses", "resident", "wasted_bytes", "copied_bytes", "copy_ns", "shadowed")
"""What workers say became of hints, as in forefetch.wire."""

LAYER_TOTALS = (*HINT_COUNTS, *VERIFIED, "stall_ns")
"""What is added up per layer; stall: the longest wait for copies among a call's workers."""

_pack_record = struct.Struct(f"={_RECORD}q").pack_into
_pack_times = struct.Struct("=2q").pack_into
_pack_counts = struct.Struct(f"={len(HINT_COUNTS)}q").pack_into
_pack_verified = struct.Struct(f"={_VERIFIED}q").pack_into
_pack_header = struct.Struct(f"={_HEADER}q").pack_into
_pack_word = struct.Struct("=q").pack_into


@dataclass(frozen=True, slots=True)
class Timings:
    """The parts of one step; field by field proto StepTimings. All but the last and `batch` and `tokens` in nanoseconds."""

    total_ns: int = 0
    attention_ns: int = 0
    gate_ns: int = 0
    link_ns: int = 0
    expert_ns: int = 0
    copy_wait_ns: int = 0
    queue_ns: int = 0
    combine_ns: int = 0
    sampling_ns: int = 0
    batch: int = 0
    tokens: int = 0
    lookahead_ns: int = 0
    lookahead_hidden_ns: int = 0  # beside the parts: it passed while workers computed
    shadow_experts: int = 0  # evaluated from copies in fewer bits, all layers


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A finished step, copied out of the ring.

    `layers` [L, 5]: start (after the step's), attention, gate, experts, combine. `calls` [L, W, 5]: rows, round trip, queue,
    copy wait, compute; all zero where a worker had no rows. A layer that was never stamped is all zero. `hints` [L, 11]:
    time of the heads, part of it that was hidden behind workers, HINT_COUNTS. `verified` [L, W, 8]: VERIFIED.
    """

    step: int
    start_ns: int
    timings: Timings
    layers: Words
    calls: Words
    hints: Words
    verified: Words


class StepRing:
    """The last `capacity` steps of a router with `layers` layers and `workers` workers."""

    def __init__(self, capacity: int, layers: int, workers: int) -> None:
        if min(capacity, layers) < 1 or workers < 0:
            raise ValueError(f"a ring of {capacity} steps, {layers} layers, {workers} workers cannot be")
        self.capacity, self.layers, self.workers = capacity, layers, workers
        self._calls_at = _HEADER + _RECORD * layers
        self._hints_at = self._calls_at + _RECORD * layers * workers
        self._verified_at = self._hints_at + _HINTS * layers
        self._slots: Words = np.zeros((capacity, self._verified_at + _VERIFIED * layers * workers), dtype=np.int64)
        self._slots[:, 1] = -1
        self._bytes = self._slots.data.cast("B")
        self._version = 0
        self._totals: Words = np.zeros((workers, 1 + _RECORD), dtype=np.int64)
        self._layer_totals: Words = np.zeros((layers, len(LAYER_TOTALS)), dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Memory of the ring, bytes."""
        return self._slots.nbytes

    def begin(self, step: int, start_ns: int) -> StepStamps:
        """Opens the slot of `step`; a step that was begun before (a replay) starts over. `start_ns`: monotonic clock."""
        self._version = (self._version | 1) + 2
        slot = step % self.capacity
        base = slot * self._slots.shape[1] * _WORD
        _pack_word(self._bytes, base, self._version)
        self._slots[slot, 1:].fill(0)
        _pack_header(self._bytes, base, self._version, step, start_ns, 0, 0, 0, 0, 0)
        return StepStamps(self, step, base, self._version, start_ns)

    def read(self, step: int) -> StepRecord | None:
        """The finished step, or None when it is not there: never begun, still open, overwritten, or overwritten meanwhile."""
        slot = self._slots[step % self.capacity]
        version = int(slot[0])
        if version & 1 or int(slot[1]) != step:
            return None
        copy = slot.copy()
        return self._record(copy) if int(slot[0]) == version else None

    def worker_totals(self) -> Words:
        """[W, 6] over all finished steps: calls, rows, round trip, queue, copy wait, compute."""
        return self._totals.copy()

    def layer_totals(self) -> Words:
        """[L, 19] over all finished steps: LAYER_TOTALS."""
        return self._layer_totals.copy()

    def _record(self, slot: Words) -> StepRecord:
        layers = slot[_HEADER : self._calls_at].reshape(self.layers, _RECORD)
        calls = slot[self._calls_at : self._hints_at].reshape(self.layers, self.workers, _RECORD)
        hints = slot[self._hints_at : self._verified_at].reshape(self.layers, _HINTS)
        verified = slot[self._verified_at :].reshape(self.layers, self.workers, _VERIFIED)
        timings = _timings(slot[:_HEADER], layers, calls, hints, int(verified[:, :, -1].sum()))
        return StepRecord(int(slot[1]), int(slot[2]), timings, layers, calls, hints, verified)

    def _count(self, record: StepRecord) -> None:
        self._totals[:, 0] += np.add.reduce(record.calls[:, :, 1] > 0, axis=0)
        self._totals[:, 1:] += np.add.reduce(record.calls, axis=0)
        counts = len(HINT_COUNTS)
        self._layer_totals[:, :counts] += record.hints[:, 2:]
        self._layer_totals[:, counts:-1] += np.add.reduce(record.verified, axis=1)
        if self.workers:
            self._layer_totals[:, -1] += record.calls[:, :, 3].max(axis=1)


class StepStamps:
    """The open slot of one step. Only the thread that called `begin` writes to it, and only until it is finished; the next step
    may be begun before. Layer and worker must be within the ring's numbers; nothing checks it."""

    __slots__ = (
        *("_base", "_bytes", "_calls", "_head_ns", "_hints", "_layers"),
        *("_ring", "_start_ns", "_step", "_verified", "_version", "_workers"),
    )

    def __init__(self, ring: StepRing, step: int, base: int, version: int, start_ns: int) -> None:
        self._ring, self._step, self._base, self._version, self._start_ns = ring, step, base, version, start_ns
        self._bytes, self._workers, self._head_ns = ring._bytes, ring.workers, 0
        self._layers = base + _HEADER * _WORD
        self._calls = base + ring._calls_at * _WORD
        self._hints = base + ring._hints_at * _WORD
        self._verified = base + ring._verified_at * _WORD

    def begins(self, start_ns: int) -> None:
        """The step's time counts from here: it was launched while the one before still ran. Before any stamp."""
        self._start_ns = start_ns

    def layer(self, layer: int, start_ns: int, attention_ns: int, gate_ns: int, experts_ns: int, combine_ns: int) -> None:
        """Stamps a layer. `start_ns`: monotonic clock; `experts_ns`: first frame sent to last reply read, 0 in a dense layer;
        neither must count time of the other (a shared expert that ran meanwhile) or of `lookahead`."""
        at = self._layers + layer * _RECORD * _WORD
        _pack_record(self._bytes, at, start_ns - self._start_ns, attention_ns, gate_ns, experts_ns, combine_ns)

    def call(
        self, layer: int, worker: int, rows: int, round_trip_ns: int, queue_ns: int, copy_wait_ns: int, compute_ns: int
    ) -> None:
        """Stamps a worker's part in a layer; the last three are the worker's own durations."""
        at = self._calls + (layer * self._workers + worker) * _RECORD * _WORD
        _pack_record(self._bytes, at, rows, round_trip_ns, queue_ns, copy_wait_ns, compute_ns)

    def lookahead(self, layer: int, own_ns: int, hidden_ns: int) -> None:
        """Stamps the time of a layer's heads: what the step waited for, and what passed while workers computed."""
        _pack_times(self._bytes, self._hints + layer * _HINTS * _WORD, own_ns, hidden_ns)

    def hints(self, layer: int, *counts: int) -> None:
        """Stamps what was named for a layer against what it chose: HINT_COUNTS, all of them."""
        _pack_counts(self._bytes, self._hints + (layer * _HINTS + 2) * _WORD, *counts)

    def verified(self, layer: int, worker: int, *counts: int) -> None:
        """Stamps what a worker says became of the hints for a layer: VERIFIED, all of them."""
        _pack_verified(self._bytes, self._verified + (layer * self._workers + worker) * _VERIFIED * _WORD, *counts)

    def head(self, ns: int) -> None:
        """Adds final norm and head to the attention part."""
        self._head_ns += ns

    def finish(self, end_ns: int, sampling_ns: int, batch: int, tokens: int) -> Timings:
        """Closes the step and adds it up. `end_ns`: monotonic clock; `batch` requests, `tokens` computed."""
        fields = (self._version, self._step, self._start_ns, end_ns, self._head_ns, sampling_ns, batch, tokens)
        _pack_header(self._bytes, self._base, *fields)
        ring = self._ring
        record = ring._record(ring._slots[self._step % ring.capacity])
        ring._count(record)
        ring._version = self._version + 1
        _pack_word(self._bytes, self._base, ring._version)
        return record.timings


def _timings(header: Words, layers: Words, calls: Words, hints: Words, shadowed: int) -> Timings:
    """Disjoint parts, but for `lookahead_hidden_ns`: of each layer's experts time, what the slowest worker reports is the
    worker's, the rest is the link's."""
    _, _, start, end, head, sampling, batch, tokens = header.tolist()
    _, attention, gate, experts, combine = np.add.reduce(layers, axis=0).tolist()
    lookahead, hidden = np.add.reduce(hints[:, :2], axis=0).tolist()
    queue = copy_wait = compute = 0
    link = experts
    if calls.size:
        busy = calls[:, :, 2] + calls[:, :, 3] + calls[:, :, 4]
        flat = np.arange(0, busy.size, busy.shape[1]) + busy.argmax(axis=1)
        slowest = calls.reshape(-1, _RECORD).take(flat, axis=0)
        _, _, queue, copy_wait, compute = np.add.reduce(slowest, axis=0).tolist()
        link = int(np.add.reduce(np.maximum(layers[:, 3] - busy.ravel().take(flat), 0)))
    return Timings(
        total_ns=end - start,
        attention_ns=attention + head,
        gate_ns=gate,
        link_ns=link,
        expert_ns=compute,
        copy_wait_ns=copy_wait,
        queue_ns=queue,
        combine_ns=combine,
        sampling_ns=sampling,
        batch=batch,
        tokens=tokens,
        lookahead_ns=lookahead,
        lookahead_hidden_ns=hidden,
        shadow_experts=shadowed,
    )
