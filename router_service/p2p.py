"""Recorded steps whose experts are on other GPUs: lanes to all workers beside their links, and what happens when one breaks.

A step that fits a layout is announced to every worker and launched, perhaps while the one before runs, and confirmed before
anything of it counts. When a lane did not answer, or its worker is gone, `confirm` ends in LinkDown: what was launched since
has done no harm, all lanes are given up, and the same tokens are computed over the workers' other links, until a thread has
opened lanes to all of them again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from expert_worker.client import Lane, Link
from forefetch.errors import ForefetchError, LinkDown
from forefetch.p2p.lane import TOLD_WORDS, Step
from forefetch.telemetry.ring import StepStamps
from forefetch.wire import Verified
from router_service.batch import StepBatch
from router_service.captured import CapturedTrunk, Ran, Recorder, to_host
from router_service.hints import Hints
from router_service.layouts import LayoutBuffers
from router_service.p2p_decoder import LaneDecoder, LaneExperts, Lanes
from router_service.trunk import Experts, Observer, Trunk
from router_service.workers import Workers

if TYPE_CHECKING:
    from expert_worker.client import Beside

log = logging.getLogger("forefetch.router")

FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 10.0
STEADY_STEPS = 64
AnyLane: TypeAlias = "Lane | Beside"
Open = Callable[[Link], AnyLane]


class Attached(Lanes, Protocol):
    """Lanes as their owner sees them."""

    def attach(self, ports: Sequence[object], owners: Tensor) -> None:
        """From now on these, in the order of workers. owners [R, L, E] of MoE layers."""

    def detach(self) -> None:
        """None any more; their memory may go afterwards."""

    def abort(self, lane: int, reason: str) -> None:
        """A worker is gone. Any thread."""

    def reason(self, lane: int) -> str:
        """What was wrong with a lane that a verdict names: it says 1 + lane."""


class Opener:
    """Opens lanes to a set of links on a thread of its own, again and again until it has all of them or others are wanted."""

    def __init__(self, open: Open) -> None:
        self._open = open
        self._guard = threading.Condition()
        self._wanted: tuple[Link, ...] = ()
        self._found: tuple[tuple[Link, ...], list[AnyLane]] | None = None
        self._closed = False
        self.reason = ""  # why there are none yet
        threading.Thread(target=self._run, name="lanes", daemon=True).start()

    def want(self, links: tuple[Link, ...]) -> None:
        """Lanes to these are wanted now; () for none."""
        with self._guard:
            if self._wanted != links:
                self._wanted = links
                self._guard.notify_all()

    def take(self, links: tuple[Link, ...]) -> list[AnyLane] | None:
        """The lanes to these, if they are there and all alive; they are the caller's then."""
        with self._guard:
            found, self._found = self._found, None
            if found is None:
                return None
            if found[0] == links and not any(lane.down for lane in found[1]):
                self._wanted = ()
                return found[1]
            self._guard.notify_all()
        _close(found[1])
        return None

    def wait(self, timeout_s: float) -> None:
        """Until lanes are there, or a first try has failed."""
        with self._guard:
            self._guard.wait_for(lambda: self._found is not None or self.reason or self._closed, timeout_s)

    def close(self) -> None:
        """Ends the thread and what nobody took."""
        with self._guard:
            self._closed, found = True, self._found
            self._guard.notify_all()
        _close(found[1] if found else [])

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            with self._guard:
                self._guard.wait_for(lambda: self._closed or (self._wanted and self._found is None))
                links = self._wanted
            if self._closed:
                return
            lanes = self._opened(links)
            with self._guard:
                if lanes is not None and not self._closed:
                    self._found, self.reason, pause = (links, lanes), "", FIRST_PAUSE_S
                    self._guard.notify_all()
                    continue
                self._guard.wait_for(lambda: self._closed or self._wanted != links, pause)  # noqa: B023
            _close(lanes or [])
            pause = min(2 * pause, LAST_PAUSE_S)

    def _opened(self, links: Sequence[Link]) -> list[AnyLane] | None:
        lanes: list[AnyLane] = []
        try:
            for link in links:
                lanes.append(self._open(link))
            return lanes
        except ForefetchError as error:
            self._failed(str(error))
        except Exception:
            log.exception("defect while opening p2p lanes")
            self._failed("internal error")
        _close(lanes)
        return None

    def _failed(self, reason: str) -> None:
        """Says it once, however often it is tried."""
        if reason != self.reason:
            log.warning("no p2p lanes: %s", reason)
        with self._guard:
            self.reason = reason
            self._guard.notify_all()


class LaneTrunk(CapturedTrunk):
    """Stands in for a Trunk: recorded steps over lanes while they are up, the trunk over the other links otherwise.

    `ahead` says how the last one went. Verdicts of steps over lanes are kept until `confirm` has looked at them; until then
    nothing goes over other links, and no new lanes are attached."""

    def __init__(
        self,
        trunk: Trunk,
        experts: LaneExperts,
        buffers: LayoutBuffers,
        lanes: Attached,
        workers: Workers,
        opener: Opener,
        shape_of: Callable[[tuple[int, int]], Step],
        recorder: Recorder | None = None,
        hints: Hints | None = None,
    ) -> None:
        """hints: who makes them, if workers have a use for them; for steps that go over other links."""
        super().__init__(trunk, experts, buffers, recorder, LaneDecoder(trunk, experts, shape_of))
        self._heads, self._hints = experts.heads, hints
        if self._heads is not None:
            self.see = self._heads.see
        self._told = dict[int, Tensor]()  # by step, [W, TOLD_WORDS] on the host, there when the step's tokens are
        self._known = np.zeros((len(workers.rows), TOLD_WORDS), dtype=np.int64)
        self._lanes, self._workers, self._opener, self._shape_of = lanes, workers, opener, shape_of
        self._links: tuple[Link, ...] = ()  # those that lanes are attached to
        self._attached: list[AnyLane] = []
        self._pause_s, self._not_before = FIRST_PAUSE_S, 0.0  # lanes that break at once are not tried at once again
        self._counts = workers.lanes
        self._verdicts = dict[int, Tensor]()  # by step, int32 [1] on the host, there when the step's tokens are
        trunk.cache.heed(lanes.verdict)

    def forward(self, batch: StepBatch, experts: Experts, stamps: StepStamps, observer: Observer | None = None) -> Tensor:
        """As Trunk.forward. Over lanes the step is only launched: see `confirm`."""
        self._verdicts = {step: verdict for step, verdict in self._verdicts.items() if step == batch.step - 1}
        self.ahead = self._up() and self.fits(batch, observer)
        self._told = {step: told for step, told in self._told.items() if step == batch.step - 1}
        if not self.ahead:
            self._settle()
            self._ran[batch.step % 2] = Ran(False)
            return self.trunk.forward(batch, experts, stamps, observer or (self._hints and self._hints.watching))
        for lane in self._attached:
            lane.announce(self._shape_of(batch.layout), batch.step)
        logits = super().forward(batch, experts, stamps)
        if self._heads is not None:
            self._heads.launched(batch.layout)
        self._verdicts[batch.step] = to_host(self._lanes.verdict)
        if self._lanes.tells:
            self._told[batch.step] = to_host(self._lanes.told)
        return logits

    def _settle(self) -> None:
        """What is in flight over lanes must be good before the host goes on with what it left. LinkDown when it is not."""
        if self._verdicts and self._buffers.chosen.is_cuda:
            torch.cuda.synchronize(self._buffers.chosen.device)
        for verdict in self._verdicts.values():
            self._judge(verdict)

    def _judge(self, verdict: Tensor) -> None:
        if lane := int(verdict):
            raise LinkDown(lane - 1, self._lanes.reason(lane - 1))

    def confirm(self, step: int) -> None:
        """See Model."""
        verdict = self._verdicts.pop(step, None)
        if verdict is None:
            return
        try:
            self._judge(verdict)
        except LinkDown as error:
            self._counts.breaks += 1
            self._not_before, self._pause_s = monotonic() + self._pause_s, min(2 * self._pause_s, LAST_PAUSE_S)
            log.warning("a step over p2p lanes broke off: worker %s: %s", self._named(error.worker), error)
            self._verdicts.clear()
            self._drop()
            raise
        self._counts.steps += 1
        self._pause_s = FIRST_PAUSE_S if self._counts.steps % STEADY_STEPS == 0 else self._pause_s

    def timed(self, step: int, stamps: StepStamps, began_ns: int, forwarded_ns: int, ended_ns: int) -> int:
        """See Model. What workers told of the step, and of hints since the one before, is stamped in its first MoE layer."""
        outside = super().timed(step, stamps, began_ns, forwarded_ns, ended_ns)
        told = self._told.pop(step, None)
        if told is not None and self._attached:
            new, self._known = told.numpy() - self._known, told.numpy().copy()
            for worker, counts in zip(self._workers.rows, new.tolist(), strict=True):
                found = Verified(*counts)
                stamps.verified(self.trunk.spec.moe_layers[0], worker.index, *found)
                worker.copies |= bool(found.hits or found.late or found.misses)
        return outside

    def _named(self, worker: int) -> str:
        return self._workers.rows[worker].address if 0 <= worker < len(self._workers.rows) else "?"

    def _up(self) -> bool:
        """Whether lanes to just the workers that are connected now are there; looks after getting them."""
        links = tuple(worker.link for worker in self._workers.rows if worker.link is not None)
        links = links if len(links) == len(self._workers.rows) else ()
        if self._attached and (links != self._links or any(lane.down for lane in self._attached)):
            self._drop()
        elif not self._attached and monotonic() >= self._not_before:
            self._opener.want(links)
            found = self._opener.take(links) if links else None
            if found is not None:
                self._attach(links, found)
        return bool(self._attached)

    def _attach(self, links: tuple[Link, ...], lanes: list[AnyLane]) -> None:
        owners = torch.from_numpy(self._workers.owners[:, list(self.trunk.spec.moe_layers)])
        self._lanes.attach([lane.port for lane in lanes], owners)
        self._links, self._attached, self._counts.up = links, lanes, True
        self._told.clear()
        self._known = torch.stack([lane.port.told for lane in lanes]).cpu().numpy()  # a local worker's lane is always the same
        for index, lane in enumerate(lanes):
            lane.on_down = lambda reason, index=index: self._lanes.abort(index, reason)  # type: ignore[misc]
            if lane.down:
                self._lanes.abort(index, lane.down)
        log.info("p2p lanes to %d workers are up", len(lanes))

    def _drop(self) -> None:
        """Gives all lanes up."""
        lanes, self._attached, self._links, self._counts.up = self._attached, [], (), False
        for lane in lanes:
            lane.on_down = lambda reason: None
        self._lanes.detach()
        _close(lanes)

    def start(self, timeout_s: float) -> None:
        """Waits for the first lanes, so that the first request finds them; without them the other links serve."""
        links = tuple(worker.link for worker in self._workers.rows if worker.link is not None)
        self._opener.want(links)
        self._opener.wait(timeout_s)
        if not self._up():
            log.warning("starting without p2p lanes: %s", self._opener.reason or "the workers did not open them in time")

    def close(self) -> None:
        """Ends lanes and the thread."""
        self._opener.close()
        self._drop()
        if self._heads is not None:
            self._heads.close()


def _close(lanes: Sequence[AnyLane]) -> None:
    for lane in lanes:
        lane.close()
