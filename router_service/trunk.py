"""The trunk: everything of the model but the routed experts, over one flat batch of T rows.

Reads top to bottom as the model runs. The rows of decoding requests come first, then chunks of prompts; only attention
tells them apart. Between `dispatch.send` and `dispatch.add` a layer's rows are with the workers; the shared expert runs
meanwhile. Those two calls are the only places where a layer may wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

import torch
from torch.nn.functional import linear, rms_norm

from forefetch.kernels.gate import choose
from forefetch.kernels.qkv import HeadNorms, rotate
from forefetch.spec import ModelSpec
from forefetch.telemetry.ring import StepStamps
from forefetch.weights import Checkpoint
from kv_service.client import Pool
from router_service.batch import StepBatch
from router_service.cache import Place, no_place
from router_service.finite import check_prompts
from router_service.layers import Layer, Loader, head_logits, project
from router_service.rope import Rope


class Experts(Protocol):
    """What the trunk needs of the dispatch."""

    def send(self, batch: StepBatch, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Sends rows x [T, H] with their choice ids, weights [T, K] to the workers; does not wait for them."""

    def add(self, out: torch.Tensor, layer: int, stamps: StepStamps) -> int:
        """Waits for the workers and adds their rows to out [T, H] in a fixed order; returns the slowest one's own time, ns.

        LinkDown when one is lost.
        """


class Attention(Protocol):
    """One step's attention: keeps K and V of all rows, then lets each row see its own sequence up to itself. Padded rows come
    out as zeros, or as anything where only they could see it."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
        """q [T, Hq, D], k, v [T, Hkv, D] -> [T, Hq, D]."""

    def decode(
        self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norms: HeadNorms | None
    ) -> torch.Tensor:
        """The same for a step in a fixed layout, from the product's rows [T, (Hq + 2 Hkv) D] on; never waits for the host."""


class Cache(Protocol):
    """Where K and V of earlier positions are kept. A step changes nothing that a replay of it would not change again."""

    page_size: int
    block_bytes: int
    most_block_bytes: int
    pool: Pool | None  # where other processes of this user find the blocks, if they do
    dtype: torch.dtype

    def step(self, batch: StepBatch, dtype: torch.dtype, scale: float) -> Attention:
        """The attention of one step's rows; `dtype` of the queries, `scale` of the scores."""

    def prepare(self, batch: StepBatch) -> None:
        """Before a recorded step is replayed; a step's attention does it by itself."""

    def recordable(self, batch: StepBatch) -> bool:
        """Whether a step in a fixed layout may be replayed: its rows lie where a recorded step looks for them."""

    def commit(self, batch: StepBatch) -> None:
        """The step of these rows can no longer fail: what is sealed is sealed now."""

    def heed(self, void: torch.Tensor) -> None:
        """From now on commits of decode rows change nothing while `void`, int32 [1] on the device, is not 0: for models whose
        steps may turn out lost when they are read."""

    def read_block(self, page: int, place: Place = no_place) -> memoryview:
        """A sealed block's bytes, in memory that `place(size)` gives, if it does. Any thread."""

    def write_block(self, page: int, data: bytes | memoryview) -> None:
        """The inverse. Any thread; nobody reads the page meanwhile. ValueError: not the bytes of a block."""

    def tail_start(self, computed: int, loaded: int) -> int:
        """Where the tokens begin that no block holds, of a request with so many positions computed and pages loaded."""

    def read_tail(self, pages: Sequence[int], lane: int, start: int, end: int) -> torch.Tensor:
        """What a request needs of committed positions start .. end beside its blocks: a copy, flat, uint8. Between steps."""

    def write_tail(self, pages: Sequence[int], lane: int, start: int, end: int, data: bytes) -> None:
        """The inverse. Between two steps. ValueError: not the bytes of so many positions."""


# attend(layer, x [T, H]) -> the residual behind the attention of a layer yet to come, if x entered it. K and V of the rows are
# written where that layer will write them, before it reads them: at positions that are not committed, so that nobody else reads
# them, and a cache must not seal a page because it was written to, but because its last position was committed.
Attend = Callable[[int, torch.Tensor], torch.Tensor]


class Observer(Protocol):
    """Watches the residual stream where experts are chosen. It must not write to what it is handed."""

    def chosen(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, attend: Attend) -> None:
        """The rows are with the workers: residual x [T, H] as the gate saw it before its norm; choice ids, weights [T, K]."""

    def returned(self, layer: int, x: torch.Tensor) -> None:
        """The workers' rows are added: residual x [T, H] behind the layer."""


@dataclass(frozen=True)
class TrunkStep:
    """What the layers of one step share."""

    batch: StepBatch
    attention: Attention | None  # None where `front` attends
    cos: torch.Tensor  # [T, 1, D]
    sin: torch.Tensor
    experts: Experts
    stamps: StepStamps
    observer: Observer | None
    front: Front | None = None


class Front(Protocol):
    """Another way to do what a layer does before its experts, and the head. What it returns is valid until the next layer."""

    def attended(self, index: int, x: torch.Tensor, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual x [T, H] before a layer -> behind its attention, and that normed."""

    def chosen(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Choice ids, weights [T, K] of what was attended last."""

    def logits(self, x: torch.Tensor, /) -> torch.Tensor:
        """Residual x [T, H] behind all layers -> float32 logits [S, V] of the rows that choose a token."""


class Model(Protocol):
    """What the engine runs: a trunk, or what stands in for one."""

    @property
    def cache(self) -> Cache:
        """K and V."""

    @property
    def ahead(self) -> bool:
        """Whether the last `forward` returned before the device was done, so that the next step may be launched before this
        one is read."""

    def forward(self, batch: StepBatch, experts: Experts, stamps: StepStamps, observer: Observer | None = None) -> torch.Tensor:
        """Runs the step's rows through all layers -> logits [S, V] of the rows that choose a token."""

    def confirm(self, step: int) -> None:
        """The step's tokens are on the host. LinkDown when it was lost all the same: then nothing of it counts, nor of what
        was launched on it."""

    def timed(self, step: int, stamps: StepStamps, began_ns: int, forwarded_ns: int, ended_ns: int) -> int:
        """The step began, `forward` returned, and its tokens were on the host at these times of the monotonic clock.

        Stamps what `forward` could not; returns what the step spent on choosing tokens, nanoseconds. At most one step that was
        launched later may be running.
        """


class Trunk:
    """`device` and `dtype` are where and in what it computes; `cache` holds K and V."""

    ahead = False  # a layer waits for workers

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        cache: Cache,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rounded: bool = False,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Reads the weights; on_progress(done, total) counts layers. UnsupportedModel for tensors that are not there.

        `rounded`: the matrices of all layers and the head are kept in 8 bits, but for gates."""
        self.spec, self.cache, self.dtype = spec, cache, dtype
        load = Loader(spec, checkpoint, dtype, device, rounded)
        self.layers = []
        for index in range(spec.layers):
            self.layers.append(load.layer(index))
            on_progress(index + 1, spec.layers)
        self.embedding = load("model.embed_tokens.weight")
        self.head = load.head(self.embedding)
        self.final_norm = load("model.norm.weight")
        self.rope = Rope(spec.rope, spec.head_dim, device)

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,
        experts: Experts,
        stamps: StepStamps,
        observer: Observer | None = None,
        front: Front | None = None,
    ) -> torch.Tensor:
        """Runs the step's rows through all layers -> float32 logits [S, V] of the rows that choose a token. NotFinite."""
        step, x = self.begun(batch, experts, stamps, observer, front), self.embedded(batch)
        for i, layer in enumerate(self.layers):
            x = self._layer(i, layer, x, step)
        check_prompts(x, batch)
        started = perf_counter_ns()
        rows = batch.logit_rows if batch.picks is None else batch.logit_rows[batch.picks]
        logits = self.logits_of(x[rows]) if front is None else front.logits(x)
        stamps.head(perf_counter_ns() - started)
        return logits

    def embedded(self, batch: StepBatch) -> torch.Tensor:
        """The step's token ids -> [T, H]."""
        x, multiplier = self.embedding[batch.token_ids], self.spec.embedding_multiplier
        return x if multiplier == 1.0 else x * multiplier

    def logits_of(self, x: torch.Tensor) -> torch.Tensor:
        """Residuals x [S, H] behind the last layer -> float32 logits [S, V]."""
        logits = head_logits(self.normed(x, self.final_norm), self.head).float()
        return logits if self.spec.logits_divisor == 1.0 else logits / self.spec.logits_divisor

    def confirm(self, step: int) -> None:
        """`forward` has raised already what went wrong."""

    def timed(self, step: int, stamps: StepStamps, began_ns: int, forwarded_ns: int, ended_ns: int) -> int:
        """See Model; `forward` has stamped all layers itself."""
        return ended_ns - forwarded_ns

    def begun(
        self, batch: StepBatch, experts: Experts, stamps: StepStamps, observer: Observer | None, front: Front | None = None
    ) -> TrunkStep:
        """What the layers of a step share."""
        cos, sin = self.rope.tables(batch.positions, self.dtype)
        runs = front is None or observer is not None
        attention = self.cache.step(batch, self.dtype, self.spec.attention_scale) if runs else None
        return TrunkStep(batch, attention, cos, sin, experts, stamps, observer, front)

    def _layer(self, index: int, layer: Layer, x: torch.Tensor, step: TrunkStep) -> torch.Tensor:
        """One decoder layer, x [T, H] -> [T, H], stamped."""
        t0 = perf_counter_ns()
        if step.front is None:
            x = self.attended(index, x, step)
            h = self.normed(x, layer.post_norm)
        else:
            x, h = step.front.attended(index, x)
        t1 = perf_counter_ns()
        if layer.gate is None:
            assert layer.dense is not None
            x = self.residual(x, layer.dense(h))
            step.stamps.layer(index, t0, t1 - t0, 0, 0, perf_counter_ns() - t1)
            return x
        ids, weights = self.choice(h, layer.gate) if step.front is None else step.front.chosen(index)
        t2 = perf_counter_ns()
        step.experts.send(step.batch, index, h, ids, weights)
        t3 = perf_counter_ns()
        if step.observer is not None:
            step.observer.chosen(index, x, ids, weights, lambda later, estimate: self.attended(later, estimate, step))
        t4 = perf_counter_ns()
        out = self.shared(layer, h)
        t5 = perf_counter_ns()
        busy = step.experts.add(out, index, step.stamps)
        t6 = perf_counter_ns()
        x = self.residual(x, out)
        t7 = perf_counter_ns()
        # Heads and shared expert ran while the workers did; only what they took beyond them is time of their own.
        hidden = min(t4 - t3, max(0, busy - (t3 - t2)))
        heads, own = t4 - t3 - hidden, t5 - t4 - min(t5 - t4, max(0, busy - (t4 - t2)))
        step.stamps.layer(index, t0, t1 - t0, t2 - t1, t6 - t2 - heads - own, own + t7 - t6)
        if step.observer is not None:
            step.observer.returned(index, x)
            step.stamps.lookahead(index, heads + perf_counter_ns() - t7, hidden)
        return x

    def choice(self, h: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed rows h [T, H] -> the experts' ids and weights [T, K]."""
        return choose(linear(h, gate), self.spec.top_k, self.spec.gate_rule, self.spec.renormalise)

    def attended(self, index: int, x: torch.Tensor, step: TrunkStep) -> torch.Tensor:
        """Residual x [T, H] before a layer -> behind its attention."""
        layer = self.layers[index]
        return self.residual(x, self._attention(index, layer, self.normed(x, layer.input_norm), step))

    def _attention(self, index: int, layer: Layer, h: torch.Tensor, step: TrunkStep) -> torch.Tensor:
        """h [T, H] -> [T, H]."""
        spec = self.spec
        assert step.attention is not None
        q, k, v = project(h, layer.qkv, layer.qkv_bias).split_with_sizes(
            (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim), dim=-1
        )
        if spec.qk_norm == "full":
            q, k = self.normed(q, layer.q_norm), self.normed(k, layer.k_norm)
        if spec.clip_qkv is not None:
            q, k, v = (t.clamp(-spec.clip_qkv, spec.clip_qkv) for t in (q, k, v))
        q, k, v = (t.view(len(t), -1, spec.head_dim) for t in (q, k, v))  # [T, heads, D]
        if spec.qk_norm == "head":
            q, k = self.normed(q, layer.q_norm), self.normed(k, layer.k_norm)
        q, k = rotate(q, step.cos, step.sin), rotate(k, step.cos, step.sin)
        return project(step.attention(index, q, k, v).flatten(1), layer.o, layer.o_bias)

    def shared(self, layer: Layer, h: torch.Tensor) -> torch.Tensor:
        """The start of the layer's sum: the shared expert, or zeros."""
        if layer.shared is None or layer.shared_gate is None:
            return torch.zeros_like(h)
        return torch.sigmoid(linear(h, layer.shared_gate)) * layer.shared(h)

    def normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """RMSNorm of x [..., H] by a layer's weight [H]."""
        return rms_norm(x, x.shape[-1:], weight, self.spec.rms_eps)

    def residual(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x with what a part of a layer adds, y [T, H]."""
        multiplier = self.spec.residual_multiplier
        return x + y if multiplier == 1.0 else torch.add(x, y, alpha=multiplier)
