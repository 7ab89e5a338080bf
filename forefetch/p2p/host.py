"""A lane in the memory of one host: the same areas, counters and bounded waits as between GPUs. For CPUs, and for tests of
both.

Signals are the bells of a shared-memory segment, whose request area is the worker's inbox and whose reply area the router's
outbox; see `shm` for why their order holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

import torch
from torch import Tensor

from forefetch.errors import LinkDown
from forefetch.p2p.lane import TOLD, TOLD_WORDS, LaneShape, behind
from forefetch.shm import Bell, Segment


class HostPort:
    """One side's view of a lane. `down` says why the other side is gone, or ""."""

    def __init__(self, segment: Segment, shape: LaneShape, dtype: torch.dtype) -> None:
        self.segment, self.shape = segment, shape
        places, rows, top_k = shape.layers, shape.rows, shape.top_k
        self.ids = _view(segment.request, torch.int32, shape.ids, (places, rows, top_k))
        self.weights = _view(segment.request, torch.float32, shape.weights, (rows, top_k))
        self.x = _view(segment.request, dtype, shape.x, (rows, shape.hidden))
        self.results = _view(segment.reply, dtype, shape.results, (rows, shape.hidden))
        self.told = _view(segment.reply, torch.int64, TOLD, (TOLD_WORDS,))
        self.down = ""

    def wait(self, bell: Bell, wanted: int, patience_s: float, spin_ns: int = 0) -> None:
        """Until the bell has counted to `wanted`. LinkDown when that does not happen in time, or the other side is gone."""
        until = monotonic() + patience_s
        while behind(seen := bell.value, wanted):
            if self.down:
                raise LinkDown(-1, self.down)
            if monotonic() > until:
                raise LinkDown(-1, f"no signal within {patience_s:g} s")
            bell.wait(seen, spin_ns)

    def abort(self, reason: str) -> None:
        """The other side is gone: ends waits. Any thread."""
        self.down = self.down or reason
        self.segment.request_bell.nudge()
        self.segment.reply_bell.nudge()


class HostLanes:
    """The router's end of all its lanes. choose(logits [N, E]): ids, weights [N, K]. own: the lane whose calls the router
    evaluates itself."""

    def __init__(
        self, choose: Callable[[Tensor], tuple[Tensor, Tensor]], patience_s: float, spin_ns: int = 0, own: int = -1
    ) -> None:
        self._own = own
        self._choose, self._patience_s, self._spin_ns = choose, patience_s, spin_ns
        self._ports: Sequence[HostPort] = ()
        self._owners = torch.empty(0)
        self._sent = self._fault = 0
        self._reasons = dict[int, str]()
        self.verdict = torch.zeros(1, dtype=torch.int32)
        """0, or 1 + the lane that did not answer, as of the last step's end."""
        self.told = torch.zeros(0, TOLD_WORDS, dtype=torch.int64)
        """What workers have told so far."""
        self.tells = True

    def attach(self, ports: Sequence[HostPort], owners: Tensor) -> None:
        """From now on these; their counters are at zero. owners [R, L, E]: who evaluates row t's pair with expert e of MoE
        layer l."""
        self.detach()
        self._ports, self._owners, self._sent = ports, owners, 0
        self._reasons.clear()

    def detach(self) -> None:
        """No lanes, and nothing is wrong with none."""
        self._ports, self._fault = (), 0
        self.verdict.zero_()

    def abort(self, lane: int, reason: str) -> None:
        """A lane's other side is gone: ends waits for it. Any thread."""
        if lane < len(self._ports):
            self._ports[lane].abort(reason)

    def put(self, place: int, first: int, x: Tensor, logits: Tensor, idle: Tensor) -> None:
        """Rows x [N, H] of MoE layer `place` with the choice from logits [N, E]; idle [N, 1] bool: padding. Behind a
        fault nothing is sent."""
        if self._fault or not self._ports:
            return
        self._sent = self._sent + 1 & 0xFFFFFFFF
        ids, weights = self._choose(logits)
        ids = ids.masked_fill(idle, -1)
        turn = (torch.arange(len(ids))[:, None] + first + ids) % len(self._owners)
        owner = self._owners[turn, place, ids].masked_fill(ids < 0, -1)
        rows = slice(first, first + len(x))
        for index, port in enumerate(self._ports):
            port.x[rows], port.weights[rows] = x, weights
            port.ids[place, rows] = ids.where(owner == index, -1).int()
            port.segment.request_bell.ring(self._sent)

    def take(self, first: int, out: Tensor, lag: int) -> None:
        """out [N, H] = the sum of the workers' rows first .. first + N, in their order; whatever it is behind a fault. lag:
        calls put since the awaited one."""
        total = torch.zeros(out.shape, dtype=torch.float32)
        for index, port in enumerate(self._ports):
            if self._fault == 0 and index != self._own:
                self._await(index, port, self._sent - lag & 0xFFFFFFFF)
            total += port.results[first : first + len(out)]
        out.copy_(total)

    def _await(self, lane: int, port: HostPort, wanted: int) -> None:
        try:
            port.wait(port.segment.reply_bell, wanted, self._patience_s, self._spin_ns)
        except LinkDown as error:
            self._fault, self._reasons[lane] = 1 + lane, str(error)

    def mirror(self) -> None:
        """The step's end: the verdict on it."""
        self.verdict.fill_(self._fault)
        self.told = torch.stack([port.told for port in self._ports]) if self._ports else self.told[:0]

    def reason(self, lane: int) -> str:
        """What was wrong with a lane that a verdict names."""
        return self._reasons[lane]


def _view(memory: memoryview, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
