"""Who leads, by a Lease: what to do about the record one sees. Pure; clocks and records are arguments.

As Kubernetes' own components do: nobody compares clocks with another machine. A holder is gone when its record has not changed
for the lease's duration *on the observer's clock*. The record's transitions count the changes of holder; they are the epoch
that fences commands, so a leader that was asleep and does not know that it was replaced is refused by those it commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["create", "take", "renew", "wait"]


@dataclass(frozen=True)
class Record:
    """A Lease's content. `renewed` is text that changes with every renewal; `version` the API server's resourceVersion."""

    holder: str
    renewed: str
    transitions: int
    version: str = ""


@dataclass
class Election:
    """One candidate. `identity` must differ between processes, also between two starts of one pod.

    duration_s: a silent holder is replaced after this long. renew_s: how often the holder renews. The holder itself stops
    leading `margin_s` before others may take over."""

    identity: str
    duration_s: float = 15.0
    renew_s: float = 4.0
    margin_s: float = 3.0
    _seen: Record | None = None
    _seen_at: float = 0.0
    _renewed_at: float | None = None  # when our last accepted renewal was sent
    _epoch: int = 0

    def decide(self, record: Record | None, now: float) -> Action:
        """What to do, having just read `record` (None: there is no Lease yet)."""
        if record is None:
            return "create"
        if self._seen is None or (record.holder, record.renewed) != (self._seen.holder, self._seen.renewed):
            self._seen_at = now
        self._seen = record
        if record.holder == self.identity:
            due = self._renewed_at is None or now - self._renewed_at >= self.renew_s
            return "renew" if due else "wait"
        if not record.holder or now - self._seen_at >= self.duration_s:
            return "take"
        return "wait"

    def next_record(self, action: Action, renewed: str) -> Record:
        """What to write for "create", "take" or "renew"."""
        if action == "create" or self._seen is None:
            return Record(self.identity, renewed, 1)
        transitions = self._seen.transitions + (action == "take")
        return Record(self.identity, renewed, transitions, self._seen.version)

    def written(self, record: Record, sent_at: float) -> None:
        """The API server took our record, which was sent at `sent_at`."""
        self._seen, self._seen_at, self._renewed_at, self._epoch = record, sent_at, sent_at, record.transitions

    def lost(self) -> None:
        """Somebody else wrote first, or a worker has seen a higher epoch: we do not lead."""
        self._renewed_at = None

    def leading(self, now: float) -> bool:
        """Whether commands may be given now."""
        return self._renewed_at is not None and now - self._renewed_at < self.duration_s - self.margin_s

    @property
    def epoch(self) -> int:
        """What rides on commands while we lead."""
        return self._epoch
