"""A step that was launched: what has to be known of it until its tokens are read, which may be one step later."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter_ns

from forefetch.telemetry.ring import StepStamps
from router_service.batch import StepBatch
from router_service.sampling import Choice, Sampled
from router_service.scheduler import Plan, Request
from router_service.trunk import Cache


@dataclass
class Flight:
    """`ahead`: the next step may be launched before this one is read. `choice` is None if none is made and nothing
    has to be waited for.

    `void`: requests whose row took a token that turned out to be another."""

    step: int
    plan: Plan
    batch: StepBatch
    stamps: StepStamps
    choice: Choice | None
    began_ns: int
    forwarded_ns: int
    ahead: bool
    void: set[Request] = field(default_factory=set)
    committed: bool = False

    def read(self) -> Sampled:
        """Its tokens, one per choosing chunk. Waits for the device."""
        return self.choice.read() if self.choice is not None else Sampled([], [], [])

    def commit(self, cache: Cache) -> None:
        """What it computed is final: all it was computed from is known to be right. Without effect the second time."""
        if not self.committed:
            self.committed = True
            void = {row for row, chunk in enumerate(self.plan.decodes) if chunk.request in self.void}
            cache.commit(self.batch.without(void) if void else self.batch)

    def times(self, landed_ns: int) -> tuple[int, int, int]:
        """(began, forwarded, ended) of a step that was just read; its own time begins when the step before had landed."""
        began = max(self.began_ns, landed_ns)
        self.stamps.begins(began)
        return began, max(self.forwarded_ns, began), perf_counter_ns()
