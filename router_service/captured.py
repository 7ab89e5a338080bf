"""Decode steps replayed from CUDA graphs: one launch for all layers, one synchronisation per token.

A step of thousands of small kernels costs more to launch than to run. Where the experts are evaluated on the trunk's own
device without the host (`Resident`), a decode step depends on nothing but the bytes of the step's buffers, which keep their
addresses; so `Decoder.forward` is recorded once for each layout of rows and replayed afterwards. Steps that fit no layout run
through the trunk as it is written, with the same experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forefetch.kernels.clock import stamp
from forefetch.telemetry.ring import StepStamps
from router_service.batch import StepBatch
from router_service.decoder import PARTS, Decoder, Resident, See
from router_service.layouts import LayoutBuffers
from router_service.trunk import Experts, Observer, Trunk

Replay = Callable[[], None]
Recorder = Callable[[Callable[[], None]], Replay]
MARK_EVERY = 128  # marks cost about a microsecond each, 5 per layer: seldom enough to stay out of the 99th percentile


class DeviceExperts:
    """The trunk's `Experts` over resident ones: a layer never waits for the host."""

    def __init__(self, resident: Resident) -> None:
        self._resident = resident
        self._rows = torch.empty(0)

    def send(self, batch: StepBatch, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Launches the layer's experts for the rows that are no padding."""
        if batch.tokens < len(ids):
            ids = ids.clone()
            ids[batch.tokens :] = -1
        self._rows = self._resident.run(layer, x, ids, weights)

    def add(self, out: Tensor, layer: int, stamps: StepStamps) -> int:
        """Adds their rows to out [T, H]."""
        out += self._rows
        return 0


class CapturedTrunk:
    """Stands in for a Trunk; `warm_up` records every layout of the buffers.

    Each layout is recorded twice, the second time with the device's clock read between the parts of a layer. A sampled step
    and every MARK_EVERY-th replays that one; the parts of other steps are the last ones scaled to their own time.
    """

    ahead = True  # nothing of a step comes back to the host

    def __init__(
        self,
        trunk: Trunk,
        experts: Resident,
        buffers: LayoutBuffers,
        recorder: Recorder | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        self.trunk, self.cache = trunk, trunk.cache
        self._decoder, self._experts = decoder or Decoder(trunk, experts), DeviceExperts(experts)
        self._buffers = buffers
        self._record = recorder or CudaRecorder(trunk.embedding.device)
        self._steps: dict[tuple[int, int, bool], tuple[Replay, list[Tensor]]] = {}
        self._clock = LayerClock(trunk.spec.layers, trunk.embedding.device)
        self._ran = [Ran(), Ran()]  # by the last bit of a step's number: one may be launched before the other is timed

    @property
    def see(self) -> See:
        """What is shown each layer's residual at its gate; to be set before `warm_up`."""
        return self._decoder.see

    @see.setter
    def see(self, see: See) -> None:
        self._decoder.see = see

    def warm_up(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Records every layout, the largest first, so that smaller ones fit the memory that it took."""
        layouts = list(self._buffers.layouts())
        for done, layout in enumerate(layouts):
            batch = self._buffers.idle(*layout)
            for marked in (False, True):
                self._steps[*layout, marked] = self._recorded(batch, marked)
            on_progress(done + 1, len(layouts))

    def _recorded(self, batch: StepBatch, marked: bool) -> tuple[Replay, list[Tensor]]:
        logits: list[Tensor] = []

        def step() -> None:
            logits[:] = [self._decoder.forward(batch, self._clock.mark) if marked else self._decoder.forward(batch)]

        return self._record(step), logits

    def forward(self, batch: StepBatch, experts: Experts, stamps: StepStamps, observer: Observer | None = None) -> Tensor:
        """As Trunk.forward. Logits are valid until the next one. `experts` is not used: these are resident."""
        marked = bool(batch.trace) or batch.step % MARK_EVERY == 0
        found = self._steps.get((*batch.layout, marked)) if self.fits(batch, observer) else None
        self._ran[batch.step % 2] = ran = Ran(found is not None)
        shadows = self._decoder.experts.shadows
        if found is None:
            eager = self.trunk.forward(batch, self._experts, stamps, observer)
            ran.found = self._decoder.experts.counters.cpu() if shadows else None
            return eager
        replay, logits = found
        self.cache.prepare(batch)
        replay()
        if marked:
            ran.times = to_host(self._clock.times)
            ran.fault = to_host(self._decoder.experts.fault)
        if marked or shadows:
            ran.found = to_host(self._decoder.experts.counters)
        return logits[0][: batch.tokens] if batch.picks is None else logits[0][batch.picks]

    def fits(self, batch: StepBatch, observer: Observer | None) -> bool:
        """Whether a step of this kind can be replayed."""
        laid_out = batch.paged is not None and (batch.chunked is not None or not batch.prefills)
        return laid_out and observer is None and self.cache.recordable(batch) and (*batch.layout, False) in self._steps

    def confirm(self, step: int) -> None:
        """No worker, no link."""

    def timed(self, step: int, stamps: StepStamps, began_ns: int, forwarded_ns: int, ended_ns: int) -> int:
        """See Model."""
        ran = self._ran[step % 2]
        if ran.found is not None:
            stamps.verified(self.trunk.spec.moe_layers[0], 0, *self._decoder.experts.verified(ran.found))
        if not ran.replayed:
            return self.trunk.timed(step, stamps, began_ns, forwarded_ns, ended_ns)
        if ran.fault is not None and ran.fault.any():
            self._decoder.experts.check()
        return self._clock.tell(stamps, began_ns, ended_ns, ran.times)


@dataclass
class Ran:
    """What a step was. Of a marked one, on the host once its tokens are: the clock's points, `fault` and `counters`."""

    replayed: bool = False
    times: Tensor | None = None
    fault: Tensor | None = None
    found: Tensor | None = None


def to_host(values: Tensor) -> Tensor:
    """A copy that is there when what was launched so far is done; nobody waits."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda).copy_(values, non_blocking=True)


class LayerClock:
    """Points in time of one step, read on the device, and how they share out a step's time."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self.times = torch.zeros(layers * len(PARTS), dtype=torch.int64, device=device)
        self._shares = np.zeros((layers, len(PARTS) - 1))  # of the whole step

    def mark(self, layer: int, part: int) -> None:
        """Reads the clock."""
        stamp(self.times, layer * len(PARTS) + part)

    def tell(self, stamps: StepStamps, began_ns: int, ended_ns: int, times: Tensor | None) -> int:
        """Stamps all layers; `times`: this step's own points, if it was marked. Returns the nanoseconds outside of layers."""
        total = ended_ns - began_ns
        if times is not None:
            self._shares = np.diff(times.numpy().reshape(-1, len(PARTS)), axis=1).clip(0) / total
        at = began_ns
        for layer, parts in enumerate((self._shares * total).astype(np.int64).tolist()):
            stamps.layer(layer, at, *parts)
            at += sum(parts)
        return max(0, ended_ns - at)


class CudaRecorder:
    """Records steps as CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, step: Callable[[], None]) -> Replay:
        """Runs `step` twice, so that kernels are compiled and workspaces exist, then records it."""
        with torch.inference_mode(), torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                step()
                step()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                step()
        return graph.replay
