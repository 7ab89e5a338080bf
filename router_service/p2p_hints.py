"""Hints of steps over lanes. Heads run within the step, behind each layer's rows that were sent; what they say goes to the
workers by gRPC while the step runs.

On a CPU the engine's thread does all of it. On a GPU heads are recorded with the step, on a stream beside it; their answers are
copied to pinned memory with a count behind them, which a thread looks at. A hint whose step is over is not sent.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forefetch.kernels.gate import choose
from forefetch.spec import ModelSpec
from router_service.forecast import MOST_ROWS
from router_service.hinted import HintedStep
from router_service.hints import Hints
from router_service.lookahead.heads import EXTRA

LOOK_S = 2e-5
"""How often the thread looks whether a layer's heads are done: a layer takes some 100 us."""
STEP_S = 5.0
"""How long it looks at most, for a step that a device has given up."""


class HostHeads:
    """See LaneHeads."""

    def __init__(self, hints: Hints, spec: ModelSpec) -> None:
        hints.carry()
        self._hints, self._rule = hints, (spec.top_k, spec.gate_rule, spec.renormalise)
        self._rows, self._x = 0, torch.empty(0)
        self._parts: list[tuple[Tensor, Tensor]] = []

    def begin(self, layout: tuple[int, int]) -> None:
        """See LaneHeads."""
        self._rows = sum(layout)
        self._parts.clear()

    def see(self, layer: int, x: Tensor) -> None:
        """See LaneHeads."""
        self._x = x

    def look(self, layer: int, first: int, logits: Tensor) -> None:
        """See LaneHeads."""
        if self._hints.now is None:
            return
        self._parts.append((self._x, logits))
        if first + len(logits) == self._rows:
            x, logits = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*self._parts, strict=True))
            self._parts.clear()
            self._hints.chosen(layer, x, *choose(logits, *self._rule), None)

    def settle(self) -> None:
        """See LaneHeads."""

    def ready(self) -> None:
        """See LaneHeads."""

    def launched(self, layout: tuple[int, int]) -> None:
        """See LaneHeads."""

    def close(self) -> None:
        """See LaneHeads."""


class DeviceHeads:
    """See LaneHeads. Steps with prompts, and with more than MOST_ROWS rows, have no heads."""

    def __init__(self, hints: Hints, spec: ModelSpec, device: torch.device) -> None:
        self._heads, self._hints, self._spec = hints.carry(), hints, spec
        moe = spec.moe_layers
        self._targets = {layer: moe[place + 1 : place + 3] for place, layer in enumerate(moe[:-1])}
        self._places = {layer: place for place, layer in enumerate(moe)}
        shape = (len(moe), 2, 2, MOST_ROWS, min(spec.top_k + EXTRA, spec.num_experts))  # experts, probabilities of two layers
        self._said = torch.zeros(shape, device=device)
        self._host = torch.zeros(shape, pin_memory=device.type == "cuda")
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._seen = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._device, self._x = device, torch.empty(0)
        self._rows, self._kept = 0, list[Any]()  # what the other stream still reads
        self._base = 0  # layers named before the next step that has heads
        self._waiting: SimpleQueue[tuple[int, HintedStep] | None] = SimpleQueue()
        self._closed = False
        threading.Thread(target=self._carry, name="lane-hints", daemon=True).start()

    # ---- within the step ----

    def begin(self, layout: tuple[int, int]) -> None:
        """See LaneHeads."""
        self._rows = layout[0] if _has_heads(layout) else 0

    def see(self, layer: int, x: Tensor) -> None:
        """See LaneHeads."""
        self._x = x

    def look(self, layer: int, first: int, logits: Tensor) -> None:
        """See LaneHeads."""
        if not self._rows or layer not in self._targets:
            return
        if self._stream is None:
            self._name(layer, first, self._x, logits)
            return
        self._kept += (self._x, logits)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._name(layer, first, self._x, logits)

    def _name(self, layer: int, first: int, x: Tensor, logits: Tensor) -> None:
        place, rows = self._places[layer], slice(first, first + len(logits))
        ids, weights = self._choice(logits)
        for number, hint in enumerate(self._heads.predict(layer, x, ids, weights)):
            self._said[place, 0, number, rows] = hint.experts.float()
            self._said[place, 1, number, rows] = hint.probabilities.float()
        if rows.stop == self._rows:
            self._host[place].copy_(self._said[place], non_blocking=True)
            self._count += 1
            self._seen.copy_(self._count, non_blocking=True)

    def _choice(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """ids, weights [N, K]."""
        rule = self._spec.gate_rule, self._spec.renormalise
        if self._stream is None:
            return choose(logits, self._spec.top_k, *rule)
        from forefetch.kernels.gate.triton import choose_into

        ids = torch.empty(len(logits), self._spec.top_k, dtype=torch.int32, device=logits.device)
        weights = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
        choose_into(logits, ids, weights, *rule)
        return ids, weights

    def settle(self) -> None:
        """See LaneHeads."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._kept.clear()

    # ---- beside it ----

    def ready(self) -> None:
        """See LaneHeads."""
        if self._stream is not None:
            torch.cuda.synchronize(self._device)
        self._base = int(self._seen)

    def launched(self, layout: tuple[int, int]) -> None:
        """See LaneHeads."""
        if not _has_heads(layout):
            return
        if self._hints.now is not None:
            self._waiting.put((self._base, self._hints.now))
        self._base += len(self._targets)

    def _carry(self) -> None:
        while (job := self._waiting.get()) is not None:
            base, step = job
            for number, (layer, targets) in enumerate(self._targets.items(), 1):
                if not self._named(base + number):
                    break
                rows = min(step.batch.tokens, MOST_ROWS)
                experts, sure = self._host[self._places[layer], :, : len(targets), :rows].numpy().copy()
                if int(self._seen) >= base + len(self._targets) + number:
                    break  # the next step has written there
                self._hints.carried(step, layer, targets, experts.astype(np.int64), sure)

    def _named(self, wanted: int) -> bool:
        """Waits until so many layers were named; False when that does not happen, or is long ago."""
        until = monotonic() + STEP_S
        while int(self._seen) < wanted:
            if self._closed or monotonic() > until:
                return False
            sleep(LOOK_S)
        return int(self._seen) < wanted + len(self._targets)

    def close(self) -> None:
        """See LaneHeads."""
        self._closed = True
        self._waiting.put(None)


def _has_heads(layout: tuple[int, int]) -> bool:
    decodes, prompt = layout
    return not prompt and decodes <= MOST_ROWS
