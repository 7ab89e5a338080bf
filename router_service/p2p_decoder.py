"""The recorded step over p2p lanes, and its form for large batches: two halves that take turns.

While the workers evaluate one half's experts, the router runs the other half's attention. One stream on each side is enough:
the router sends half 0, then half 1, and takes half 0 back where the next layer begins. Rows and sums are those of the
undivided step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from forefetch.kernels.grouped_mlp.unsummed import Unsummed
from forefetch.kernels.norm import add_rms_norm
from forefetch.p2p.lane import Step
from forefetch.spec import ModelSpec
from forefetch.wire import Verified
from router_service.batch import StepBatch
from router_service.decoder import Decoder, Mark
from router_service.layers import Layer, head_logits
from router_service.trunk import Attention, Trunk

if TYPE_CHECKING:
    from expert_worker.client import Beside


class Lanes(Protocol):
    """The router's end of all lanes: `HostLanes`, `DeviceLanes`."""

    def put(self, place: int, first: int, x: Tensor, logits: Tensor, idle: Tensor) -> None:
        """Sends rows first .. first + N of MoE layer `place`: x [N, H], logits [N, E]; idle [N, 1] bool: padding."""

    def take(self, first: int, out: Tensor, lag: int) -> None:
        """out [N, H] = the sum of what the workers answered. lag: calls put since the awaited one."""

    def mirror(self) -> None:
        """The end of a step: the verdict on it, and what workers told."""

    tells: bool  # whether `told` is looked after

    @property
    def told(self) -> Tensor:
        """int64 [W, lane.TOLD_WORDS] on the device: what workers have told by the end of the last step."""

    @property
    def verdict(self) -> Tensor:
        """int32 [1] on the device: not 0 from the end of a step that went wrong until lanes are attached or detached."""


class LaneHeads(Protocol):
    """Heads within a step over lanes, and who carries what they say to the workers: `HostHeads`, `DeviceHeads`."""

    def begin(self, layout: tuple[int, int]) -> None:
        """A step of that many decoding and prompt rows begins."""

    def see(self, layer: int, x: Tensor) -> None:
        """x [N, H], the residual at a gate, right before `look` at the same rows."""

    def look(self, layer: int, first: int, logits: Tensor) -> None:
        """logits [N, E] of rows first .. first + N, which are on their way; the last rows of a layer are the last to come."""

    def settle(self) -> None:
        """The step's end."""

    def ready(self) -> None:
        """Steps are recorded; from now on they count."""

    def launched(self, layout: tuple[int, int]) -> None:
        """A step is under way."""

    def close(self) -> None:
        """No more steps."""


class LaneExperts:
    """Experts behind lanes, as a Decoder wants them. own: the share of them that is in this process. heads: set before steps
    are recorded, if what they say is of use to anybody."""

    heads: LaneHeads | None = None

    def __init__(
        self,
        spec: ModelSpec,
        lanes: Lanes,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        own: Beside | None = None,
    ) -> None:
        self._own = own
        self._lanes, self._places = lanes, {layer: place for place, layer in enumerate(spec.moe_layers)}
        self._out = torch.zeros(max_rows, spec.hidden_size, dtype=dtype, device=device)
        self._idle = torch.ones(max_rows, 1, dtype=torch.bool, device=device)
        self._sent = 0  # calls of this step

    def hold(self, batch: StepBatch) -> None:
        """Rows of a step behind one that went wrong become idle: what that left is not theirs to build on."""
        assert batch.paged is not None
        void = self._lanes.verdict != 0
        for places in (batch.slots, batch.paged.lengths, batch.held):
            if places is not None:
                places.masked_fill_(void, 0)

    def begin(self, idle: Tensor) -> None:
        """A step begins; idle [T, 1] marks padding."""
        self._idle, self._sent = idle, 0

    def send(self, layer: int, first: int, x: Tensor, logits: Tensor) -> int:
        """Rows first .. first + N on their way; the number of their call."""
        place = self._places[layer]
        self._lanes.put(place, first, x, logits, self._idle[first : first + len(x)])
        if self.heads is not None:
            self.heads.look(layer, first, logits)
        if self._own is not None:
            self._own.evaluate(place, first, len(x))
        self._sent += 1
        return self._sent

    def receive(self, first: int, count: int, call: int) -> Tensor:
        """What came back from a call with rows first .. first + count [count, H]; valid until they are received again."""
        out = self._out[first : first + count]
        self._lanes.take(first, out, self._sent - call)
        return out

    def route(self, layer: int, x: Tensor, logits: Tensor) -> Tensor:
        """x [T, H], gate logits [T, E] -> [T, H]. Valid until the next call."""
        return self.receive(0, len(x), self.send(layer, 0, x, logits))

    def unsummed(self, layer: int, x: Tensor, logits: Tensor) -> Tensor | Unsummed:
        """As `route`: what comes back is added up."""
        return self.route(layer, x, logits)

    def run(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Steps that are not recorded go over the other links."""
        raise AssertionError("lanes carry recorded steps only")

    def settle(self, idle: Tensor) -> None:
        """The step's end; workers count its pairs themselves."""
        if self._own is not None:
            self._own.settle(len(idle))
        if self.heads is not None:
            self.heads.settle()
        self._lanes.mirror()

    shadows = False

    @property
    def fault(self) -> Tensor:
        """The verdict; `LaneTrunk` asks for every step's."""
        return self._lanes.verdict

    @property
    def counters(self) -> Tensor:
        """Workers count."""
        return self._lanes.verdict[:0]

    def verified(self, counters: Tensor) -> Verified:
        """Workers tell."""
        return Verified()

    def check(self) -> None:
        """Nothing to find."""


@dataclass
class _Half:
    """Rows first .. first + count of a step, and where they are: x residual, h normed."""

    first: int
    count: int
    attention: Attention
    cos: Tensor
    sin: Tensor
    x: Tensor
    h: Tensor
    local: Tensor | None = None  # what is added to the experts' sum: the shared expert; None: nothing
    dense: Tensor | None = None  # the whole of a layer without routed experts
    call: int = 0  # that it waits for; 0: none


class LaneDecoder(Decoder):
    """shape_of(layout): how many rows it has, and in how many parts they are sent."""

    experts: LaneExperts

    def __init__(self, trunk: Trunk, experts: LaneExperts, shape_of: Callable[[tuple[int, int]], Step]) -> None:
        super().__init__(trunk, experts)
        self._shape_of = shape_of

    @torch.inference_mode()
    def forward(self, batch: StepBatch, mark: Mark = lambda layer, part: None) -> Tensor:
        """As Decoder.forward."""
        self.experts.hold(batch)
        self.experts.begin(batch.slots[:, None] < self.trunk.cache.page_size)
        if self.experts.heads is not None:
            self.experts.heads.begin(batch.layout)
        step = self._shape_of(batch.layout)
        return super().forward(batch, mark) if step.parts == 1 else self._in_turns(batch, step, mark)

    def _in_turns(self, batch: StepBatch, step: Step, mark: Mark) -> Tensor:
        """A step of decode rows. Marks are the first half's; its wait holds the other's attention."""
        spec, trunk = self.spec, self.trunk
        halves = [self._begin(batch, first, count) for first, count in step.cuts()]
        following = [*(layer.input_norm for layer in trunk.layers[1:]), trunk.final_norm]
        for index, layer in enumerate(trunk.layers):
            for number, half in enumerate(halves):
                if index:
                    self._land(half, following[index - 1])
                    self._mark(mark, number, index - 1, 3, 4)
                self._mark(mark, number, index, 0)
                qkv = self._qkv(layer, half.h)
                y = half.attention.decode(index, qkv, half.cos, half.sin, self._head_norms[index])
                y = self._output(layer, y.flatten(1))
                half.x, half.h = add_rms_norm(half.x, y, layer.post_norm, spec.rms_eps, spec.residual_multiplier)
                self._mark(mark, number, index, 1)
                self.see(index, half.x)
                self._send(index, layer, half)
                self._mark(mark, number, index, 2)
        for number, half in enumerate(halves):
            self._land(half, following[-1])
            self._mark(mark, number, len(trunk.layers) - 1, 3, 4)
        self.experts.settle(batch.slots[:, None])
        logits = head_logits(torch.cat([half.h for half in halves]), trunk.head)
        return logits.float() / spec.logits_divisor if spec.logits_divisor != 1.0 else logits

    @staticmethod
    def _mark(mark: Mark, number: int, layer: int, *parts: int) -> None:
        for part in parts if number == 0 else ():
            mark(layer, part)

    def _begin(self, batch: StepBatch, first: int, count: int) -> _Half:
        spec, trunk = self.spec, self.trunk
        part = batch.part(first, count)
        cos, sin = trunk.rope.tables(part.positions, trunk.dtype)
        x = trunk.embedding[part.token_ids]
        if spec.embedding_multiplier != 1.0:
            x = x * spec.embedding_multiplier
        x, h = add_rms_norm(x, None, trunk.layers[0].input_norm, spec.rms_eps)
        return _Half(first, count, trunk.cache.step(part, trunk.dtype, spec.attention_scale), cos, sin, x, h)

    def _send(self, index: int, layer: Layer, half: _Half) -> None:
        half.local, half.dense, half.call = None, None, 0
        if layer.gate is None:
            assert layer.dense is not None
            half.dense = layer.dense(half.h)
            return
        half.call = self.experts.send(index, half.first, half.h, self._choices(layer.gate, half.h))
        if layer.shared is not None and layer.shared_gate is not None:
            half.local = torch.sigmoid(linear(half.h, layer.shared_gate)) * layer.shared(half.h)

    def _land(self, half: _Half, norm: Tensor) -> None:
        """The layer's sum, and the next norm."""
        y = half.dense
        if half.call:
            y = self.experts.receive(half.first, half.count, half.call)
            y = y if half.local is None else y + half.local
        half.x, half.h = add_rms_norm(half.x, y, norm, self.spec.rms_eps, self.spec.residual_multiplier)


def step_shape(layout: tuple[int, int], halves_from: int) -> Step:
    """How a layout (decode rows, prompt rows) crosses lanes: in halves if it only decodes, from so many rows on (0: never)."""
    decodes, prompt = layout
    return Step(decodes + prompt, 2 if halves_from and not prompt and decodes >= halves_from else 1)
