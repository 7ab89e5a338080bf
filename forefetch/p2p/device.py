"""A lane in the memory of two GPUs, and a router's end of all its lanes. `host` is the plain form of the same calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from forefetch.kernels.hop import triton as hop
from forefetch.p2p.lane import TOLD, TOLD_WORDS, LaneShape
from forefetch.p2p.memory import Mapped

ROOM = 64
"""Most turns of replicas that a router's table holds."""


class DevicePort:
    """One side's view of a lane: the inbox and the outbox, one of them its own memory, the other the peer's."""

    def __init__(self, inbox: Mapped, outbox: Mapped, shape: LaneShape, dtype: torch.dtype) -> None:
        self.inbox, self.outbox, self.shape = inbox, outbox, shape
        rows, top_k = shape.rows, shape.top_k
        self.ids = inbox.tensor(torch.int32, shape.ids, (shape.layers, rows, top_k))
        self.weights = inbox.tensor(torch.float32, shape.weights, (rows, top_k))
        self.x = inbox.tensor(dtype, shape.x, (rows, shape.hidden))
        self.results = outbox.tensor(dtype, shape.results, (rows, shape.hidden))
        self.told = outbox.tensor(torch.int64, TOLD, (TOLD_WORDS,))
        self.asked, self.answered = (area.tensor(torch.int32, 0, (1,)) for area in (inbox, outbox))

    def close(self) -> None:
        """When no kernel uses it any more."""
        for area in (self.inbox, self.outbox):
            area.close()


def offsets(shape: LaneShape) -> hop.Offsets:
    """The layout as the kernels want it."""
    return hop.Offsets(shape.ids, 4 * shape.rows * shape.top_k, shape.weights, shape.x, shape.results)


class DeviceLanes:
    """The router's end of `count` lanes of one shape. What it records stays valid when lanes come and go."""

    def __init__(
        self,
        count: int,
        shape: LaneShape,
        experts: int,
        renormalise: bool,
        patience_s: float,
        device: torch.device,
        own: int = -1,
    ) -> None:
        """renormalise: gate weights are divided by the sum of the chosen; see `kernels/gate`. own: the lane whose calls the
        router's stream evaluates itself."""
        self._shape, self._at, self._renormalise = shape, offsets(shape), renormalise
        self._patience_ns, self._own = int(patience_s * 1e9), own

        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        table = torch.zeros(count, 2, dtype=torch.int64, device=device)
        self._state = hop.State(table, ints(2, count), ints(1), ints(ROOM, shape.layers, experts), ints(1) + 1)
        self.verdict = ints(1)
        """0, or 1 + the lane that did not answer, as of the last step's end."""
        self.told = torch.zeros(count, TOLD_WORDS, dtype=torch.int64, device=device)
        """What workers have told so far, if they are asked (`tells`)."""
        self.tells = False
        self._blame = torch.arange(1, count + 1, dtype=torch.int32).pin_memory()
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._guard, self._reasons = threading.Lock(), dict[int, str]()

    def attach(self, ports: Sequence[DevicePort], owners: Tensor) -> None:
        """From now on these; their counters are at zero. owners [R, L, E]: who evaluates row t's pair with expert e of MoE
        layer l."""
        if len(owners) > ROOM:
            raise ValueError(f"{len(owners)} turns of replicas, {ROOM} at most")
        state = self._state
        with self._guard:
            self._reasons.clear()
            state.counts.zero_()
            state.fault.zero_()
            state.owners[: len(owners)] = owners
            state.turns.fill_(len(owners))
            state.table.copy_(torch.tensor([(port.inbox.address, port.outbox.address) for port in ports]))
            torch.cuda.synchronize(state.table.device)

    def detach(self) -> None:
        """No lanes, and nothing is wrong with none; waits for the device, so that their memory may go."""
        torch.cuda.synchronize(self._state.table.device)
        for words in (self._state.table, self._state.fault, self.verdict):
            words.zero_()

    def abort(self, lane: int, reason: str) -> None:
        """A lane's other side is gone: ends waits for it. Any thread."""
        with self._guard, torch.cuda.stream(self._side):
            self._reasons[lane] = reason
            self._state.fault.copy_(self._blame[lane : lane + 1], non_blocking=True)

    def put(self, place: int, first: int, x: Tensor, logits: Tensor, idle: Tensor) -> None:
        """Rows x [N, H] of MoE layer `place` with the choice from logits [N, E]; idle [N, 1] bool: padding."""
        hop.put(self._state, self._at, place, first, x, logits, idle.view(-1), self._shape.top_k, self._renormalise)

    def take(self, first: int, out: Tensor, lag: int) -> None:
        """out [N, H] = the sum of the workers' rows. lag: calls put since the awaited one."""
        hop.take(self._state, self._at, first, out, lag, self._patience_ns, self._own)

    def mirror(self) -> None:
        """The step's end: the verdict on it. The fault may be set at any moment by `abort`; who is to act on the same must
        read this copy, which changes in the order of steps alone."""
        self.verdict.copy_(self._state.fault)
        if self.tells:
            hop.told(self._state, TOLD, self.told)

    def reason(self, lane: int) -> str:
        """What was wrong with a lane that a verdict names."""
        return self._reasons.get(lane, f"no signal within {self._patience_ns / 1e9:g} s")
