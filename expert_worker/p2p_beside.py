"""A share of the experts in the router's own process, as one more lane: the step that sends the rows evaluates them itself.

The router's GPU waits while others evaluate a layer's experts; with a share of its own it reads weights meanwhile, and every
GPU has fewer to read. Its inbox and outbox are its own memory, no signal is needed because one stream does both sides, and
`take` adds its rows in the workers' order like anybody's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from expert_worker.links import LocalLink
from expert_worker.p2p import call_of
from expert_worker.packed import PackedExperts
from forefetch import shm
from forefetch.errors import Mismatch
from forefetch.p2p.host import HostPort
from forefetch.p2p.lane import LaneShape, Step


class Beside:
    """The lane to a LocalLink. `evaluate` is part of the router's step, and recorded with it."""

    def __init__(self, link: LocalLink, shape: LaneShape, device: torch.device) -> None:
        """Mismatch when the experts cannot be evaluated within a recorded step."""
        self.link, self.core, self.shape = link, link.core, shape
        self.down = ""
        self.on_down: Callable[[str], None] = lambda reason: None
        self._layers, self._number = sorted(link.info.layers), 0
        self._packed: PackedExperts | None = None
        if device.type == "cuda":
            experts = link.core.experts
            if not isinstance(experts, PackedExperts):
                raise Mismatch("no kernel evaluates experts of this model's sizes and types within a recorded step")
            if experts.shadows:
                raise Mismatch("p2p lanes do not tell what was evaluated from shadows")
            self._packed, self._share = experts, experts.share(shape.rows)
        self.port = self._port(device)
        self.port.ids.fill_(-1)

    def _port(self, device: torch.device) -> Any:
        shape, dtype = self.shape, self.link.info.dtype
        if device.type == "cuda":
            from forefetch.p2p import memory
            from forefetch.p2p.device import DevicePort

            if not memory.available():
                raise Mismatch("p2p lanes between GPUs need CUDA's driver bindings (pip install 'forefetch[gpus]')")
            inbox, outbox = memory.Mapped(shape.inbox_bytes, device), memory.Mapped(shape.outbox_bytes, device)
            return DevicePort(inbox, outbox, shape, dtype)
        segment = shm.Segment.create(shape.inbox_bytes, shape.outbox_bytes)
        segment.unlink()
        return HostPort(segment, shape, dtype)

    def evaluate(self, place: int, first: int, count: int) -> None:
        """Rows first .. first + count of MoE layer `place`, which were just put."""
        port, layer, rows = self.port, self._layers[place], slice(first, first + count)
        where = port.x[rows], port.ids[place, rows], port.weights[rows]
        if self._packed is not None:
            self._packed.evaluate(layer, *where, port.results[rows], self._share)
            return
        call = call_of(self._number, layer, *where)
        if len(call.pair_row):
            *_, verified = self.core.forward(call, port.results[rows])
            port.told += torch.tensor(verified)
        else:
            port.results[rows] = 0

    def settle(self, rows: int) -> None:
        """The step's end: its choices are counted."""
        if self._packed is not None:
            self._packed.tell(self._share, self.port.told)
            self._packed.count(self.port.ids[:, :rows])
            self._packed.join(self._share)

    def announce(self, step: Step, number: int) -> None:
        """A step is about to be launched; nobody needs to be told."""
        self._number = number
        if self._packed is not None:
            self.core.calls += len(self._layers) * step.parts
            self.core.rows += len(self._layers) * step.rows

    def close(self) -> None:
        """It stays: recorded steps write there for as long as the router lives."""
