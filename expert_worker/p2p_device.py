"""A worker's end of a lane between GPUs: a recorded graph for each shape of step.

Between two calls lies one program (`turn`): it signals that results are in the router's memory, and awaits the next rows in
ours. Experts are evaluated from there and write their sums straight into the router's memory. Calls of several lanes, and
those over other links, take a lock on the device: the experts' kernel needs the whole GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import sub

import torch

from expert_worker.core import Core
from expert_worker.p2p_following import MEETING_S, Following
from expert_worker.packed import PackedExperts
from forefetch.errors import LinkDown
from forefetch.kernels.hop import triton as hop
from forefetch.p2p.device import DevicePort
from forefetch.p2p.lane import TOLD_WORDS, Step
from forefetch.p2p.memory import Mapped, visit
from forefetch.v1 import expert_pb2
from forefetch.wire import Verified

_OPENING = threading.Lock()
"""Recording and taking memory disturb one another: one lane is opened at a time."""


class DeviceFollowing(Following):
    """See the module."""

    def __init__(self, core: Core, hello: expert_pb2.OpenLaneRequest, source: str) -> None:
        super().__init__(core, hello, source)
        assert isinstance(core.experts, PackedExperts)
        self._experts = core.experts
        self._device = torch.device(core.info.device)
        with _OPENING:
            self._port = self._met(hello.meeting)
            self._prepare()

    def _met(self, meeting: str) -> DevicePort:
        """Our inbox for the router's outbox."""
        inbox = Mapped(self.shape.inbox_bytes, self._device)
        try:
            outbox = Mapped(self.shape.outbox_bytes, self._device, visit(meeting, inbox.export(), MEETING_S))
        except BaseException:
            inbox.close()
            raise
        return DevicePort(inbox, outbox, self.shape, self.core.info.dtype)

    def _prepare(self) -> None:
        """State, scratch and a graph for each step."""
        experts = self._experts
        self._share = experts.share(self.shape.rows, self.source)
        self._state = torch.zeros(3, dtype=torch.int32, device=self._device)  # calls taken, fault, whether the lock is ours
        self._share.fault = self._state[1:2]
        self._seen = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._mine = torch.zeros(TOLD_WORDS, dtype=torch.int64, device=self._device)
        self._told = torch.zeros(TOLD_WORDS, dtype=torch.int64, pin_memory=True)
        self._known = Verified()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # what was just made is there
        self._graphs: dict[Step, torch.cuda.CUDAGraph] = {}
        experts.lanes += 1
        try:
            self._graphs = self._record(self.steps)
        except BaseException:
            self.close()
            raise

    def step(self, step: Step, number: int) -> None:
        """Launches the step's graph; what it finds wrong ends the lane at the next step, and what it counted is told then."""
        self._tell()
        if int(self._seen):
            raise LinkDown(-1, f"the router sent no rows within {self.patience_s:g} s")
        graph = self._graphs[step]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            graph.replay()
        self.core.calls += len(self.layers) * step.parts
        self.core.rows += len(self.layers) * step.rows

    def _tell(self) -> None:
        """What steps that ended have counted since, for operators."""
        now = Verified(*self._told.tolist())
        self.core.count(Verified(*map(sub, now, self._known)))
        self._known = now

    @torch.inference_mode()
    def _record(self, steps: Sequence[Step]) -> dict[Step, torch.cuda.CUDAGraph]:
        """A graph per shape, the largest first. Kernels are compiled by running them once, without a router."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._port.ids.fill_(-1)
            for wait in (True, False):
                where = self._port.asked, self._port.answered, self._state, torch.zeros_like(self._experts.lock)
                hop.turn(*where, 0, answer=True, wait=wait)
            for count in {count for step in steps for _, count in step.cuts()}:
                with self._experts.alone():
                    self._evaluate(0, slice(0, count))
            self._settle(1)
            for words in (self._state, self._share.counters, self._mine, self._port.told):
                words.zero_()
            self._stream.synchronize()
            self._seen.zero_()
            self._told.zero_()
        graphs, pool = {}, torch.cuda.graph_pool_handle()
        for step in sorted(steps, key=lambda step: -step.rows):
            graphs[step] = graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(self._device):
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    self._calls(step)
        return graphs

    def _calls(self, step: Step) -> None:
        self._turn(answer=False, wait=True)
        cuts = [(place, slice(first, first + n)) for place in range(len(self.layers)) for first, n in step.cuts()]
        for number, (place, rows) in enumerate(cuts, 1):
            self._evaluate(place, rows)
            if number == len(cuts) and self._experts.moves:
                self._experts.tell(self._share, self._mine)
                self._port.told.copy_(self._mine)
            self._turn(answer=True, wait=number < len(cuts))
        self._settle(step.rows)

    def _evaluate(self, place: int, rows: slice) -> None:
        port = self._port
        where = (port.x[rows], port.ids[place, rows], port.weights[rows], port.results[rows])
        self._experts.evaluate(self.layers[place], *where, self._share)

    def _settle(self, rows: int) -> None:
        """The step's end: its choices are counted, and the host can see whether it went well."""
        self._experts.count(self._port.ids[:, :rows])
        self._experts.join(self._share)
        self._seen.copy_(self._state[1:2], non_blocking=True)
        if self._experts.moves:
            self._told.copy_(self._mine, non_blocking=True)

    def _turn(self, *, answer: bool, wait: bool) -> None:
        where = self._port.asked, self._port.answered, self._state, self._experts.lock
        hop.turn(*where, int(self.patience_s * 1e9), answer=answer, wait=wait)

    def leave(self) -> None:
        """Also ends the device's waits: the fault is set beside what runs."""
        super().leave()
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]
            self._state[1:2].fill_(1)

    def close(self) -> None:
        """Gives everything back once the device is done with it; waits are bounded."""
        self._stream.synchronize()
        self._graphs.clear()
        self._tell()
        self._experts.leave(self._share)
        self._port.close()
        self._experts.lanes -= 1
