"""How a step is launched, and what has to be known of it until its tokens are read, which may be one step later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns

from torch import Tensor

from forefetch.telemetry.ring import StepStamps
from router_service.batch import StepBatch, StepBuffers
from router_service.dispatch import Dispatch
from router_service.hints import Hints
from router_service.kv import KvSide
from router_service.recorder import Recorder
from router_service.sampling import Choice, Sampled, choose
from router_service.scheduler import Chunk, Plan, Request, Scheduler
from router_service.trunk import Cache, Model
from router_service.workers import Workers


@dataclass
class Parts:
    """What the engine drives."""

    trunk: Model
    buffers: StepBuffers
    dispatch: Dispatch
    workers: Workers
    scheduler: Scheduler
    recorder: Recorder
    kv: KvSide | None = None
    hints: Hints | None = None


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
    confirm: Callable[[int], None]
    void: set[Request] = field(default_factory=set)
    committed: bool = False

    def read(self) -> Sampled:
        """Its tokens, one per choosing chunk. Waits for the device. LinkDown when the step turns out to have been lost."""
        sampled = self.choice.read() if self.choice is not None else Sampled([], [], [])
        self.confirm(self.step)
        return sampled

    def commit(self, cache: Cache) -> None:
        """What it computed is final: all it was computed from is known to be right. Without effect the second time."""
        if not self.committed:
            self.committed = True
            void = {row for row, chunk in enumerate(self.plan.decodes) if chunk.request in self.void}
            cache.commit(self.batch.without(void) if void else self.batch)

    def times(self, landed_ns: int) -> tuple[int, int, int]:
        """(began, forwarded, ended) of a step that was just read; its own time begins when the step before had landed."""
        began = max(self.began_ns, landed_ns)
        if self.ahead:  # others have stamped their layers already, counted from where the step was begun
            self.stamps.begins(began)
        return began, max(self.forwarded_ns, began), perf_counter_ns()


def launch(parts: Parts, step: int, plan: Plan, stamps: StepStamps) -> Flight:
    """The step under way: its logits, and the tokens that they choose, or on a GPU the promise of both.

    LinkDown when a worker is lost: then nothing has changed."""
    trunk = parts.trunk
    batch = parts.buffers.fill(step, plan, parts.recorder.trace_of(plan))
    observer = parts.hints.begin(batch, stamps) if parts.hints else None
    began = perf_counter_ns()
    parts.dispatch.begin()
    logits = trunk.forward(batch, parts.dispatch, stamps, observer)
    parts.dispatch.commit()
    forwarded, ahead = perf_counter_ns(), trunk.ahead and observer is None
    choice = _choice(parts.buffers, logits, plan.choosing, ahead)
    return Flight(step, plan, batch, stamps, choice, began, forwarded, ahead, trunk.confirm)


def _choice(buffers: StepBuffers, logits: Tensor, choosing: tuple[Chunk, ...], ahead: bool) -> Choice | None:
    """One token per chunk, left where the next step will look for it too. Never None for a step that runs ahead or on a GPU:
    it is what is waited for before the memory that the step was staged in is written again."""
    if not (choosing or ahead or logits.is_cuda):
        return None
    params = [chunk.request.admitted.sampling for chunk in choosing]
    return choose(logits, params, [chunk.end for chunk in choosing], into=buffers.landing if ahead else None)
