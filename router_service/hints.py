"""Hints to workers: at each gate the heads name what the next two MoE layers will probably choose, and behind each layer the
next one again, unless the attention ahead was run, which knew better; the step goes on whatever becomes of them.

Heads run after a layer's rows were sent, so as a rule while workers compute. On a GPU their answer is fetched by a thread
of its own, so that the step never waits for it. Letters: T rows, M experts named per row, E experts, K top-k, W workers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from forefetch.hints import FIRST, REFINED, ExpertHint
from forefetch.telemetry.ring import StepStamps, Timings
from router_service.batch import StepBatch
from router_service.dispatch import Dispatch
from router_service.forecast import Floats, Ints, Pace, Trial, likeliest, looked_at
from router_service.hinted import HintedStep, Named
from router_service.lookahead.heads import Hint
from router_service.trunk import Attend

log = logging.getLogger("forefetch.router")

OFF, PLAIN, ATTENTION = "off", "plain", "attention"  # heads do not run; alone; with the attention of the layers ahead
NEXT, SECOND, AGAIN = 0, 1, 2  # made one layer before, two before, and again behind the layer before
MOST_FAILURES = 8  # in a row; then heads stay off until the router starts again
MOST_WAITING = 32  # answers that a GPU has not finished


class Heads(Protocol):
    """What makes hints; `lookahead.Lookahead` is one."""

    def predict(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, attend: Attend | None = None
    ) -> list[Hint]:
        """For the next two MoE layers, nearer first."""

    def refine(self, layer: int, x: torch.Tensor) -> Hint | None:
        """For the next one, from behind the layer."""


class Hints:
    """A trunk's observer. `setting`: "attention", "plain", or "auto": what costs steps least, while any worker copies.

    Nothing here may end or change a step: what fails is counted and logged.
    """

    def __init__(
        self,
        heads: Heads,
        dispatch: Dispatch,
        *,
        setting: str,
        trained: bool,
        clock: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self.setting, self.trained = setting, trained
        self._trial = Trial((OFF, PLAIN, ATTENTION)) if setting == "auto" else None
        self.sent = self.failures = 0
        self._recorded = self._within = self._carried = False
        self.naming = False  # heads run inside the compiled step that was begun
        self.foresee: Callable[[Sequence[int]], None] | None = None  # what a compiled step's tokens are told to
        self.heads, self._dispatch, self._workers, self._clock = heads, dispatch, dispatch.workers, clock
        spec = dispatch.workers.spec
        self._experts = spec.num_experts
        self._pace, self._failed_in_a_row = Pace(spec.moe_layers), 0
        self._now: HintedStep | None = None
        self._mode, self._decodes = OFF, False
        self._waiting: SimpleQueue[Named | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def record(self) -> Heads:
        """The heads, for recorded steps: from now on those run them, and no hints are sent."""
        self._recorded = True
        return self.heads

    def compile(self) -> Heads:
        """The heads, for compiled decode steps: from now on those run them by themselves, if `naming` says so, unless the
        attention ahead is to be run. No hints are sent for them."""
        self._within = True
        if self._trial is not None:
            self._trial = Trial((OFF, PLAIN))
        return self.heads

    def carry(self) -> Heads:
        """The heads, for steps over lanes: those call `chosen` or `carried` while they run, and have no observer."""
        self._carried = True
        return self.heads

    @property
    def watching(self) -> Hints | None:
        """The observer of a step that was begun, where it goes over other links than lanes."""
        return self if self._now is not None else None

    @property
    def now(self) -> HintedStep | None:
        """The step that was begun, for `carried`; None while hints are of no use."""
        return self._now

    def carried(
        self, step: HintedStep, source: int, targets: Sequence[int], experts: Ints, sure: npt.NDArray[np.float32]
    ) -> None:
        """What heads said within a step at the gate of `source`: experts and probabilities [D, T, M]. Any one thread."""
        try:
            self._deliver(step, source, (NEXT, SECOND), targets, experts, sure)
        except Exception:
            self.failures += 1
            log.exception("a hint could not be delivered")

    @property
    def mode(self) -> str:
        """How heads run in the next step that only decodes. Where nobody ever copies an expert there is nothing to gain."""
        if self._recorded:
            return PLAIN
        if self._failed_in_a_row >= MOST_FAILURES:
            return OFF
        if self._carried and self._trial is not None:  # they run beside the step or while workers compute
            return PLAIN if any(worker.copies for worker in self._workers.rows) else OFF
        if self._trial is None:
            return self.setting
        return self._trial.way if any(worker.copies for worker in self._workers.rows) else OFF

    @property
    def dropped(self) -> int:
        """Hints that never left because a stream was down or did not keep up."""
        return sum(w.hints_dropped + (w.link.hints_dropped if w.link else 0) for w in self._workers.rows)

    def begin(self, batch: StepBatch, stamps: StepStamps) -> Hints | None:
        """A step starts: its observer, or None when heads do not run."""
        self._mode, self._decodes = self.mode, not batch.prefills
        within = self._within and self._decodes and self._mode == PLAIN
        self.naming = within
        if self._mode == OFF or self._recorded or within:
            self._now = None
            return None
        self._dispatch.chosen = self._dispatch.chosen[:0]
        rows = looked_at(batch.decodes, batch.tokens)
        device = batch.token_ids.device
        self._now = HintedStep(batch, stamps, None if rows is None else torch.from_numpy(rows).to(device))
        self._pace.begin(bool(batch.prefills))
        return None if self._carried else self

    def chosen(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, attend: Attend | None) -> None:
        """Counts what had been named for this layer; names experts of the next two. attend: the attention ahead, if any."""
        self._guarded(lambda step: self._chosen(step, layer, x, ids, weights, attend))

    def returned(self, layer: int, x: torch.Tensor) -> None:
        """Names the next layer's again."""
        self._guarded(lambda step: self._returned(step, layer, x))

    def landed(self, tokens: Sequence[int]) -> None:
        """The step chose these tokens, one for each row that chose; the next one will begin with them."""
        if self.naming and self.foresee is not None:
            self.foresee(tokens)

    def learn(self, timings: Timings) -> None:
        """The step is done. What it waited for copies and heads, over all else it did, is what ways are compared by."""
        if self._trial is not None and self._decodes and any(worker.copies for worker in self._workers.rows):
            paid = timings.copy_wait_ns + timings.lookahead_ns
            self._trial.learn(paid / max(1, timings.total_ns - paid))

    def close(self) -> None:
        """Ends the thread, if there is one."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(timeout=2.0)

    # ---- inside the step ----

    def _guarded(self, action: Callable[[HintedStep], None]) -> None:
        if self._now is None:
            return
        try:
            action(self._now)
            self._failed_in_a_row = 0
        except Exception:  # heads are no part of the model: whatever they do, the step goes on
            self.failures += 1
            self._failed_in_a_row += 1
            if self._failed_in_a_row in (1, MOST_FAILURES):
                log.exception("lookahead failed %d times in a row", self._failed_in_a_row)
            if self._failed_in_a_row >= MOST_FAILURES:
                self._now = None

    def _chosen(
        self, step: HintedStep, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, attend: Attend | None
    ) -> None:
        self._pace.gate(layer, self._clock())
        self._count(step, layer, ids)
        walk = attend if self._walks(step) else None
        if walk is None:
            x, ids, weights = (self._picked(step, part) for part in (x, ids, weights))
        named = self.heads.predict(layer, x, ids, weights, walk)
        self._answer(step, layer, named, (NEXT, SECOND))

    def _returned(self, step: HintedStep, layer: int, x: torch.Tensor) -> None:
        self._pace.returned(layer, self._clock())
        if self._walks(step):
            return
        hint = self.heads.refine(layer, self._picked(step, x))
        if hint is not None:
            self._answer(step, layer, [hint], (AGAIN,))

    def _walks(self, step: HintedStep) -> bool:
        """Whether the attention ahead is run. Token by token only: in a prefill rows would see one another's estimates, and the
        whole chunk's attention would run again."""
        return self._mode == ATTENTION and not step.batch.prefills

    @staticmethod
    def _picked(step: HintedStep, part: torch.Tensor) -> torch.Tensor:
        """The rows that are looked at, without padding."""
        return part[: step.batch.tokens] if step.rows is None else part[step.rows]

    def _answer(self, step: HintedStep, source: int, hints: Sequence[Hint], kinds: Sequence[int]) -> None:
        """Experts and probabilities to the host, then to the workers; on a GPU that is for the thread to do."""
        if not hints:
            return
        rows = min(len(hints[0].experts), step.batch.tokens)  # with attention, padding took part
        targets = [hint.layer for hint in hints]
        if hints[0].experts.device.type != "cuda":
            experts = np.stack([hint.experts[:rows].numpy() for hint in hints])
            sure = np.stack([hint.probabilities[:rows].float().numpy() for hint in hints])
            self._deliver(step, source, kinds, targets, experts, sure)
        elif self._waiting.qsize() < MOST_WAITING:
            both = [torch.stack([part[:rows].float() for part in (h.experts, h.probabilities)]) for h in hints]
            host = torch.empty((2, len(hints), *both[0].shape[1:]), pin_memory=True)
            host.copy_(torch.stack(both, dim=1), non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
            self._start_thread()
            self._waiting.put(Named(step, source, kinds, targets, host, ready))

    def _count(self, step: HintedStep, layer: int, ids: torch.Tensor) -> None:
        """What the layer chose against what was named for it, and what for each kind of hint."""
        named = dict(step.due.pop(layer, {}))  # a copy: the thread below may be adding to it
        if not named:
            return
        chosen, everything = np.zeros((2, self._experts), dtype=bool)
        chosen[self._dispatch.chosen if self._dispatch.chosen.size else ids[: step.batch.tokens].cpu().numpy()] = True
        by_kind = [0] * 6
        for kind, experts in named.items():
            everything[experts] = True
            by_kind[2 * kind : 2 * kind + 2] = len(experts), int(np.count_nonzero(chosen[experts]))
        counts = (int(np.count_nonzero(marks)) for marks in (chosen, everything, chosen & everything))
        step.stamps.hints(layer, *counts, *by_kind)

    # ---- to the workers: the engine's thread, or on a GPU the one below ----

    def _deliver(
        self,
        step: HintedStep,
        source: int,
        kinds: Sequence[int],
        targets: Sequence[int],
        experts: Ints,
        sure: npt.NDArray[np.float32],
    ) -> None:
        """experts and probabilities [D, T, M] of D targets."""
        for kind, target, names, probabilities in zip(kinds, targets, experts, sure, strict=False):
            likely = likeliest(names, probabilities, self._experts)
            step.due.setdefault(target, {})[kind] = likely[0]
            self._send(step.batch.step, source, target, REFINED if kind == AGAIN else FIRST, *likely)

    def _send(self, step: int, source: int, target: int, phase: int, names: Ints, likely: Floats) -> None:
        """One hint to each worker that some row's pair with one of the named experts may go to."""
        owners = self._workers.owners[:, target, names]  # [R, n]
        window = self._pace.window(target, self._clock())
        experts, likely = names.astype(np.int32), likely.astype(np.float32)
        for worker in self._workers.rows:
            own = (owners == worker.index).any(axis=0)
            if worker.link is not None and own.any():
                worker.link.hint(ExpertHint(step, source, target, phase, experts[own], likely[own], window))
                self.sent += 1

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._fetch, name="hints", daemon=True)
            self._thread.start()

    def _fetch(self) -> None:
        while (answer := self._waiting.get()) is not None:
            try:
                answer.ready.synchronize()
                if answer.step is self._now:  # else the step is over, or broke off
                    experts, sure = answer.both.numpy()
                    self._deliver(answer.step, answer.source, answer.kinds, answer.targets, experts.astype(np.int64), sure)
            except Exception:
                self.failures += 1
                log.exception("a hint could not be delivered")
