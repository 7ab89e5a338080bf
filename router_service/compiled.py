"""A CPU's decode steps by compiled kernels: a layer's trunk in one call, and with experts in this process all layers in one.

Stands in for a Trunk. Steps with prompt rows, padded ones and those of more rows than there is room for run through the trunk
as it is written; both give the same numbers up to the rounding of float32 sums. The GIL is free while a call computes, so
streams are served meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forefetch.kernels.compiled import layer, step, visit
from forefetch.kernels.compiled.crew import Crew
from forefetch.kernels.compiled.linear import Packed, padded
from forefetch.kernels.compiled.locks import compiling, helpers
from forefetch.kernels.few_rows import Matrix
from forefetch.telemetry.ring import StepStamps
from router_service.ahead import CompiledHeads
from router_service.batch import StepBatch
from router_service.between import Between, foresight_of
from router_service.cache import KvCache
from router_service.compiled_sizes import buffers_of, mlp_of, model_of
from router_service.hints import Hints
from router_service.layers import Layer
from router_service.trunk import Experts, Observer, Trunk
from router_service.turns import halved, in_turns
from router_service.workers import Worker, Workers

if TYPE_CHECKING:
    from expert_worker.client import WholeExperts

Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Local:
    """A worker in this process that has every expert, each in a slot or on its way into one."""

    worker: Worker
    experts: WholeExperts


class CompiledTrunk:
    """`max_rows`: most rows of a decode step. `local`: where experts are in this process; then a step is one call, which looks
    ahead by itself, as `hints` say, where they move.

    halves_from: from so many rows on steps over wires run in two halves that take turns (`turns`); 0: never.
    """

    ahead = False  # a step is over when it returns

    def __init__(
        self,
        trunk: Trunk,
        max_rows: int,
        workers: Workers,
        local: Local | None,
        halves_from: int = 0,
        hints: Hints | None = None,
    ) -> None:
        self.trunk, self.cache, self.max_rows = trunk, trunk.cache, max_rows
        self.weights, self.model = Weights(trunk), model_of(trunk)
        self.buffers = buffers_of(self.model, max_rows)
        self._workers, self._local, self._halves_from = workers, local, halves_from
        self._experts = experts = local.experts.room(max_rows) if local else None
        count = helpers(0 if local else 1)  # workers in other processes need a core while this one computes
        self._moving = moving = local.experts.moving(trunk.spec.layers, 1 + count) if local else None
        hints = hints if moving and moving.any else None
        self._ahead, self._naming = CompiledHeads(trunk, max_rows, hints), False
        self._between, self._rows = Between(trunk, max_rows, foresight_of(trunk, hints)), 0
        seen = self.model, self.buffers, experts, moving, self._ahead.heads, self._between.seen
        self._crew = Crew(count, lambda board, number: step.assist(board, number, *seen))
        if hints is not None and self._between.any and self._crew.helpers:
            hints.foresee = self.foresee
        self._mlp = mlp_of(trunk, max_rows)
        self._times: Longs = np.zeros((trunk.spec.layers, step.TIMES), dtype=np.int64)
        self._logits: Floats = np.zeros((max_rows, padded(trunk.spec.vocab_size)), dtype=np.float32)
        self.computing: Callable[[], None] = lambda: None
        """Called in each step when what follows computes, as far as possible without the GIL."""

    def warm_up(self, observed: bool) -> None:
        """Compiles what steps will call, or reads it from where it was kept, so that no request waits for it: steps of no rows.

        observed: steps may be watched, and are run layer by layer then."""
        trunk, none = self.trunk, np.zeros((0, self.model.dim), dtype=np.float32)
        nobody: Longs = np.zeros(0, dtype=np.int64)
        rows = layer.Rows(nobody, nobody, np.zeros((0, 1), dtype=np.int64), none, none)
        with compiling():
            self._layers(rows, 0)
            if self._moving is not None and self._moving.any:
                self.foresee([])
                self._still()
            if self._local is None or observed:
                table = self.weights.tables[trunk.spec.moe_layers[0]]
                layer.attended_call(self.model, table, rows, self.buffers, self.board)
                layer.gate_call(self.model, table, self.buffers, 0, self.board)
            self.head(nobody)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, experts: Experts, stamps: StepStamps, observer: Observer | None = None) -> Tensor:
        """As Trunk.forward. Logits are valid until the next one."""
        count = len(batch.token_ids)
        fits, whole = count <= min(batch.decodes, self.max_rows), self._local is not None and observer is None
        if not (fits and whole):
            self.computing()
        if not fits:
            self._still()
            return self.trunk.forward(batch, experts, stamps, observer)
        front = Front(self, batch)
        if self._local is None and halved(batch, observer, self._halves_from):
            return in_turns(self.trunk, batch, experts, stamps, lambda part: Front(self, part), front.logits)
        if self._local is None or observer is not None:
            self._still()
            return self.trunk.forward(batch, experts, stamps, observer, front)
        self.buffers.x[:count] = self.trunk.embedded(batch).numpy()
        self.computing()
        self._layers(front.rows, batch.step)
        self._rows = count
        self._stamp(stamps, self._local, count)
        started = perf_counter_ns()
        logits = front.logits()
        stamps.head(perf_counter_ns() - started)
        return logits

    def foresee(self, tokens: Sequence[int]) -> None:
        """The step that was computed last chose these: has helpers bring in what the next one will probably need."""
        if self._local is not None and self._moving is not None and len(tokens) == self._rows:
            self._between.expect(tokens, self.buffers, self._local.experts, self._moving, self.board)

    def _still(self) -> None:
        """Before experts are called in any other way than by `_layers`: helpers move none any more."""
        self._rows = 0
        if self._local is not None and self._moving is not None and self._moving.any:
            self._between.abandon(self._local.experts, self._moving)

    def confirm(self, step: int) -> None:
        """`forward` has raised already what went wrong."""

    def timed(self, step: int, stamps: StepStamps, began_ns: int, forwarded_ns: int, ended_ns: int) -> int:
        """See Model."""
        return self.trunk.timed(step, stamps, began_ns, forwarded_ns, ended_ns)

    def head(self, which: Longs) -> Tensor:
        """Logits [S, V] of rows `which` of buffers.x."""
        spec, buffers, weights = self.trunk.spec, self.buffers, self.weights
        norm = self.trunk.final_norm.data_ptr()
        scratch = buffers.normed, buffers.order, self._logits
        step.head(buffers.x, which, norm, weights.head, self.model.eps, *scratch, spec.vocab_size, self.board)
        logits = torch.from_numpy(self._logits)[: len(which), : spec.vocab_size]
        return logits if spec.logits_divisor == 1.0 else logits / spec.logits_divisor

    @property
    def board(self) -> Longs:
        """Over which helpers are told what to do."""
        return self._crew.board

    def _layers(self, rows: layer.Rows, number: int) -> None:
        """All layers of step `number` with local experts; nothing without them."""
        if self._local is None or self._moving is None:
            return
        self._moving.counts[:] = 0
        self._naming = self._ahead.naming and self._crew.helpers > 0  # without help copies would only come sooner
        within = self._naming and not self._between.any
        ahead = self._moving, self._ahead.heads, self._between.seen, within
        whole = self._experts, self._mlp, self._workers.load, self._times, *ahead, self.board
        with self._local.experts.still(number):
            step.layers(self.model, self.weights.tables, rows, self.buffers, *whole)

    def _stamp(self, stamps: StepStamps, local: Local, rows: int) -> None:
        """What the links, the observer and the trunk would have written down."""
        index, spent, waits = local.worker.index, 0, 0
        moe, pairs = self.trunk.spec.moe_layers, rows * self.trunk.spec.top_k
        verified = self._verified(local)
        told = self._moving.counts[:, visit.NAMED : visit.FOUND + 1].tolist() if self._moving and self._naming else ()
        for number, (start, seen, chosen, back, end, found, named) in enumerate(self._times.tolist()):
            stamps.layer(number, start, seen - named, chosen - seen, back - chosen, end - back)
            if found and told:
                self._ahead.stamp(stamps, number, named - start, found, *told[number])
            if found:
                *counts, stall = verified[number].tolist()
                stamps.call(number, index, rows, back - chosen, 0, stall, back - chosen - stall)
                stamps.verified(number, index, *counts, 0)
                spent, waits = spent + back - chosen - stall, waits + stall
        local.worker.calls += len(moe)
        local.worker.pairs += pairs * len(moe)
        local.worker.copies |= bool(verified[:, :3].any())
        local.experts.evaluated(len(moe), rows, pairs, spent, waits, verified[:, :4].sum(axis=0))

    def _verified(self, local: Local) -> Longs:
        """[L, 8]: telemetry's VERIFIED of each layer but the last, then how long it waited for copies."""
        found: Longs = np.zeros((len(self._times), 8), dtype=np.int64)
        if self._moving is None or not self._moving.any:
            found[:, 3] = self._times[:, 5]
        else:
            local.experts.verified(self._moving, found)
        return found


class Front:
    """One step's rows, and layer by layer what a trunk does before the experts."""

    def __init__(self, compiled: CompiledTrunk, batch: StepBatch) -> None:
        self._compiled, self._batch = compiled, batch
        trunk = compiled.trunk
        cos, sin = trunk.rope.rows(batch.positions)
        table = np.ascontiguousarray(batch.page_table.numpy())
        self.rows = layer.Rows(batch.slots.numpy(), np.array(batch.lengths), table, cos, sin)

    def attended(self, index: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Residual x [T, H] before a layer -> behind its attention, and that normed. Valid until the next layer."""
        compiled, count = self._compiled, len(x)
        buffers = compiled.buffers
        buffers.x[:count] = x.numpy()
        layer.attended_call(compiled.model, compiled.weights.tables[index], self.rows, buffers, compiled.board)
        return torch.from_numpy(buffers.x[:count]), torch.from_numpy(buffers.normed[:count])

    def chosen(self, index: int) -> tuple[Tensor, Tensor]:
        """Choice ids, weights [T, K] of what `attended` left. Valid until the next layer."""
        compiled, count = self._compiled, len(self.rows.slots)
        buffers = compiled.buffers
        layer.gate_call(compiled.model, compiled.weights.tables[index], buffers, count, compiled.board)
        return torch.from_numpy(buffers.ids[:count]), torch.from_numpy(buffers.weights[:count])

    def logits(self, x: Tensor | None = None) -> Tensor:
        """Logits [S, V] of the residual x [T, H] behind all layers, or of the one that is there already."""
        if x is not None:
            self._compiled.buffers.x[: len(x)] = x.numpy()
        return self._compiled.head(self._batch.logit_rows.numpy())


class Weights:
    """A trunk's matrices once more, packed (bfloat16 if that is what they are), and the table of addresses of all weights."""

    def __init__(self, trunk: Trunk) -> None:
        self._kept: list[Packed] = []  # memory that the table points to
        self.tables: Longs = np.zeros((trunk.spec.layers, layer.COLUMNS), dtype=np.int64)
        assert isinstance(trunk.cache, KvCache)
        for row, one, k, v in zip(self.tables, trunk.layers, trunk.cache.k, trunk.cache.v, strict=True):
            row[[layer.K_POOL, layer.V_POOL]] = k.data_ptr(), v.data_ptr()
            self._fill(row, one)
        self.head: Longs = np.zeros(2, dtype=np.int64)
        self._pack(self.head, 0, trunk.head.t() if isinstance(trunk.head, Tensor) else trunk.head)

    def _fill(self, row: Longs, one: Layer) -> None:
        vectors = {
            layer.INPUT_NORM: one.input_norm,
            layer.POST_NORM: one.post_norm,
            layer.Q_NORM: one.q_norm,
            layer.K_NORM: one.k_norm,
            layer.QKV_BIAS: one.qkv_bias,
            layer.O_BIAS: one.o_bias,
            layer.SHARED: one.shared_gate,
        }
        for column, vector in vectors.items():
            row[column] = 0 if vector is None else vector.data_ptr()
        self._pack(row, layer.QKV, one.qkv)
        self._pack(row, layer.OUTPUT, one.o)
        if one.gate is not None:
            self._pack(row, layer.GATE, one.gate.t())
        if mlp := one.dense or one.shared:
            row[layer.WIDTH] = len(mlp.w2)
            self._pack(row, layer.W13, mlp.w13)
            self._pack(row, layer.W2, mlp.w2)

    def _pack(self, row: Longs, column: int, matrix: Matrix) -> None:
        packed = Packed.of(matrix if isinstance(matrix, Tensor) else matrix.dense(torch.float32))
        self._kept.append(packed)
        row[column], row[column + 1] = packed.memory.data_ptr(), packed.kind


def takes(trunk: Trunk) -> bool:
    """Whether these kernels can run the trunk's decode steps."""
    spec, cache = trunk.spec, trunk.cache
    dense = isinstance(cache, KvCache) and cache.dtype == torch.float32
    return dense and trunk.dtype == torch.float32 and trunk.embedding.is_cpu and spec.head_dim % 2 == 0
