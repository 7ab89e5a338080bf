"""Packed experts with fewer slots than experts on a GPU, where the host takes no part in a layer.

All experts wait in pinned host memory, which the GPU reads at the same addresses; those in slots are read there, the others in
place, by the same kernels through the same table. What comes into slots and who gives way is decided and copied by the device
(`kernels/residency`), on a stream beside the layers, also inside a recorded step. So nothing ever waits for the host, an answer
is the same bits wherever an expert lies, and a hint only says what to copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expert_worker.convert import Shard, fill
from expert_worker.host import Host
from expert_worker.moving import MovingShare, Teller, turn
from expert_worker.packed import PackedExperts, Share, dense
from expert_worker.residency import Copied
from forefetch.errors import BadRequest
from forefetch.hints import ExpertHint
from forefetch.kernels import residency
from forefetch.kernels.grouped_mlp.moe import moe
from forefetch.kernels.grouped_mlp.scratch import MoeScratch
from forefetch.kernels.grouped_mlp.unsummed import Unsummed
from forefetch.kernels.residency.state import COUNTERS, Mover, Residents, aligned
from forefetch.weights import Checkpoint
from forefetch.wire import LayerCall, Verified

COPIES, HEADS, PICKS = range(3)  # streams beside the layers


class InPlaceExperts(PackedExperts):
    """`PackedExperts` with `slots` slots. Not for concurrent use, but for `hint`."""

    moves = True

    def __init__(self, *args: Any, slots: int, cache: Path | None = None, most_copies: int = 2, **place: Any) -> None:
        """slots: at least a layer's top-k. cache: where converted experts are kept on disk. most_copies: per layer."""
        self._slots, self._cache, self._most_copies = slots, cache, most_copies
        super().__init__(*args, **place)
        cuda = self._device.type == "cuda"
        self._streams = [torch.cuda.Stream(self._device) for _ in range(3)] if cuda else []  # type: ignore[no-untyped-call]
        self._weights = torch.zeros(self._chosen.shape, dtype=torch.float32, device=self._device)
        self._forked: set[Any] = set()
        self._idle: Tensor | None = None
        self._hinted_calls = 0  # calls until hints count as having stopped
        self._hinting = threading.Lock()  # hints come from threads of their own
        self._hinter = Mover.of(self.state)
        own: Any = {"mover": Mover.of(self.state), "stream": self._streams[PICKS] if cuda else None}
        self._own = MovingShare(self._scratch, self.state.counters, **own)  # of calls over other links than lanes
        self._shares: list[MovingShare] = []
        self._past = torch.zeros_like(self.state.counters)  # counted by lanes that are gone
        self._teller = Teller(self.expert_bytes, self._device)
        self._kept: list[object] = []  # what the other streams of a step still read
        self._told = np.zeros(len(COUNTERS), dtype=np.int64)

    def _hold(self, checkpoint: Checkpoint, on_progress: Callable[[int, int], None]) -> None:
        spec, cuda = self.spec, self._device.type == "cuda"
        members = [(layer, expert) for layer in spec.moe_layers for expert in self.held]
        self._memory = torch.empty(self._slots, self.expert_bytes, dtype=torch.uint8, device=self._device)
        host = Host(
            len(members),
            spec.hidden_size,
            spec.expert_width,
            self.format,
            pinned=cuda,
            allocate=lambda experts, stride: aligned(experts, stride, self._memory),
        )
        fill(host, Shard(spec, checkpoint, members, self._device), self._cache, on_progress)
        numbers = torch.tensor([self.layers[layer] * spec.num_experts + expert for layer, expert in members])
        self.state = Residents(self._memory, host.blobs, numbers, len(self.layers), spec.num_experts, self._most_copies)
        self.state.occupy()

    @property
    def copied(self) -> Copied:
        """Totals. Waits for the device."""
        counters = sum((share.counters for share in list(self._shares)), self.state.counters + self._past)
        return Copied(bytes=int(counters[COUNTERS.index("brought")]) * self.expert_bytes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in slots and in host memory."""
        return self._memory.numel() + self.state.host.numel()

    # ---- layers ----

    def run(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], ids, weights [T, K] -> [T, H]; pairs with id -1 count nothing. Valid until the next call."""
        place, out = self.layers[layer], self._out[: len(x)]
        residency.enter(self.state, place, ids)
        self._move(place, None)
        self._products(place, x, ids, weights, out, self._scratch)
        self._count_layer(place, ids)
        self._join()  # a recorded step may come next, which moves experts too
        return out

    def _count_layer(self, place: int, ids: Tensor) -> None:
        chosen = ids.flatten().long() % self._load.shape[1]
        self._load[place].scatter_add_(0, chosen, torch.ones_like(chosen))

    def route(self, layer: int, x: Tensor, logits: Tensor) -> Tensor:
        """x [T, H], gate logits [T, E] -> [T, H], the choice included. Valid until the next call. `settle` ends the step."""
        place, rows = self.layers[layer], len(x)
        ids, weights, out = self._chosen[place, :rows], self._weights[place, :rows], self._out[:rows]
        rule = self.spec.gate_rule, self.spec.renormalise
        residency.choose_and_enter(self.state, place, logits, ids, weights, *rule, self._idle)
        self._move(place, (ids, weights))
        self._products(place, x, ids, weights, out, self._scratch)
        return out

    def unsummed(self, layer: int, x: Tensor, logits: Tensor) -> Tensor | Unsummed:
        """As `route`."""
        return self.route(layer, x, logits)

    def _products(self, place: int, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, scratch: MoeScratch) -> None:
        """The layer that `enter` has found, into out [T, H]."""
        moe(x, ids, weights, self.state.base, self.state.rows, out, scratch)

    def begin(self, idle: Tensor) -> None:
        """A step of whole layers begins; idle [T, 1]: rows that are padding, which need no experts."""
        self._idle = idle.flatten()
        self._forked.clear()

    def settle(self, idle: Tensor) -> None:
        """Joins what runs beside the step, and counts its pairs; idle [T, 1] marks rows that are padding."""
        self._join()
        self._kept.clear()
        self._idle = None
        super().settle(idle)

    def keep(self, *tensors: object) -> None:
        """Until the step is settled: `ahead` reads them on another stream."""
        self._kept += tensors

    def _move(self, place: int, chosen: tuple[Tensor, Tensor] | None) -> None:
        """Heads and copies of a layer whose experts are known, beside everything else."""
        after = self._named(place, chosen)
        least = 0.0 if place and self.ahead is not None else residency.LEAST  # what is missed is named next time, and the link
        self._bring(place, self._targets(place), least, self._beside(PICKS, after))  # is busy; the first layer is never named

    def _targets(self, place: int) -> int:
        return min(2, len(self.layers) - 1 - place)

    def _bring(self, place: int, targets: int, least: float, where: AbstractContextManager[Any]) -> None:
        """Choices on one stream, copies on the next, so that the link never waits for a choice, nor a choice for victims."""
        with where as stream:
            residency.pick(self.state, place, targets, least)
        with self._beside(COPIES, stream):
            residency.bring(self.state, place)
        with torch.cuda.stream(stream) if stream else nullcontext():
            residency.spare(self.state, (place + 1) % len(self.layers))

    def _named(self, place: int, chosen: tuple[Tensor, Tensor] | None) -> Any:
        """Runs the heads, if there are any; the stream on which they did, or the current one."""
        if self.ahead is None or chosen is None:
            return None
        with self._beside(HEADS, None) as stream:
            named = self.ahead(self.spec.moe_layers[place], *chosen)
            if named is not None:
                self.keep(*named)
                residency.note(self.state, place + 1, *named)
        return stream

    @contextmanager
    def _beside(self, number: int, after: Any) -> Iterator[Any]:
        """One of the streams beside the current one, from here on, or from where stream `after` is."""
        if not self._streams:
            with nullcontext():
                yield None
            return
        stream = self._streams[number]
        self._forked.add(stream)
        stream.wait_stream(after or torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield stream

    def _join(self) -> None:
        """Waits, on the device, for what runs beside; a recorded step may only wait for streams that it has forked itself."""
        while self._forked:
            torch.cuda.current_stream(self._device).wait_stream(self._forked.pop())

    # ---- calls over lanes and other links ----

    def share(self, rows: int, source: str = "") -> MovingShare:
        """See PackedExperts."""
        plain = super().share(rows, source)
        beside = torch.cuda.Stream(self._device) if self._streams else None  # type: ignore[no-untyped-call]
        found = MovingShare(
            plain.scratch, plain.counters, mover=Mover.of(self.state, plain.counters), stream=beside, source=source
        )
        self._shares.append(found)
        return found

    def evaluate(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, share: Share) -> None:
        """See PackedExperts. By whoever has the device's lock: one layer is at work at a time."""
        self._evaluate(self.layers[layer], x, ids, weights, out, share, residency.LEAST)

    def _evaluate(self, place: int, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, share: Share, least: float) -> None:
        assert isinstance(share, MovingShare)
        residency.enter(self.state, place, ids, share.counters, share.fault)
        share.move(self.state, place, self._targets(place), least)
        self._products(place, x, ids, weights, out, share.scratch)

    def tell(self, share: Share, told: Tensor) -> None:
        """See PackedExperts."""
        self._teller.tell(share.counters, told)

    def join(self, share: Share) -> None:
        """See PackedExperts."""
        assert isinstance(share, MovingShare)
        share.join()

    def leave(self, share: Share) -> None:
        """See PackedExperts. When nothing of it runs any more."""
        self._past += share.counters
        self._shares = [other for other in self._shares if other is not share]

    @torch.inference_mode()
    def forward(self, call: LayerCall, out: Tensor, source: str = "") -> tuple[int, Verified]:
        """Fills out [N, H], which may lie on the host. Nothing is waited for; the second number says what was found where."""
        if call.layer not in self.layers:
            raise BadRequest("layer", f"layer {call.layer} has no routed experts")
        place, rows = self.layers[call.layer], self._out[: len(call.x)]
        x, ids, weights = (part.to(self._device) for part in (call.x, *dense(call, self.held, self.spec.top_k)))
        self._hinted_calls = max(0, self._hinted_calls - 1)
        least = 0.0 if place and self._hinted_calls else residency.LEAST
        with self.alone() as fault:
            self._own.fault = fault
            self._evaluate(place, x, ids, weights, rows, self._own, least)
        self._count_layer(place, ids)
        out.copy_(rows)
        return 0, self.verified(self.state.counters.cpu())

    @property
    def counters(self) -> Tensor:
        """int64 [len(COUNTERS)]."""
        return self.state.counters

    def verified(self, counters: Tensor) -> Verified:
        """How experts were found, and what was copied, since this was asked last; counters: on the host."""
        now: Any = counters.numpy().copy()
        new = dict(zip(COUNTERS, (now - self._told).tolist(), strict=True))
        self._told = now
        moved = {f"{to}_bytes": new[name] * self.expert_bytes for name, to in (("wasted", "wasted"), ("brought", "copied"))}
        shadowed = new["absent"] if self.shadows else 0
        return Verified(**{name: new[name] for name in ("hits", "late", "misses", "resident")}, **moved, shadowed=shadowed)

    @torch.inference_mode()
    def hint(self, hint: ExpertHint, source: str = "") -> bool:
        """Has experts copied ahead of time; any thread. False when it is about a layer or experts that are not held here."""
        if not PackedExperts.hint(self, hint):
            return False
        place, self._hinted_calls = self.layers[hint.layer], 4 * len(self.layers)
        if place:
            experts, chances = (torch.from_numpy(part)[None, None] for part in (hint.experts, hint.probabilities))
            with self._hinting, self._hinted():
                residency.note(self.state, place, experts.to(self._device), chances.to(self._device))
                turn(self.state, self._mover_of(source), place - 1, 1, 0.0, afresh=True)
        return True

    def _mover_of(self, source: str) -> Mover:
        """Of hints; copies count for the lane of the router that sent them, if it has one."""
        counters = next((share.counters for share in self._shares if share.source == source), self.state.counters)
        return replace(self._hinter, counters=counters)

    def _hinted(self) -> AbstractContextManager[Any]:
        """The stream of hints, which waits for no call."""
        return torch.cuda.stream(self._streams[COPIES]) if self._streams else nullcontext()

    def resident(self, layer: int) -> list[int]:
        """The layer's experts that sit in slots, ascending; none for a layer without routed experts. Waits for the device."""
        return self.state.resident(self.layers[layer]) if layer in self.layers else []
