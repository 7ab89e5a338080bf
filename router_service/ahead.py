"""Heads inside a compiled step, where experts move in this process: they name a layer's experts right before its attention.

A copy there takes less time than the attention ahead. So of what heads know, the surest is enough: what
`Lookahead.refine` says.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from forefetch.kernels.compiled import ahead
from forefetch.kernels.compiled.linear import Packed, padded
from forefetch.telemetry.ring import StepStamps
from router_service.hints import Hints
from router_service.lookahead.heads import EXTRA, Lookahead, Ranking
from router_service.trunk import Trunk

Longs = npt.NDArray[np.int64]


class CompiledHeads:
    """`heads` is what a compiled step is handed; without hints it names nothing."""

    def __init__(self, trunk: Trunk, rows: int, hints: Hints | None) -> None:
        self._hints, self._kept = hints, list[Packed | Tensor]()
        source = hints.compile() if hints is not None else None
        rankings = source.rankings() if isinstance(source, Lookahead) else {}
        spec, layers = trunk.spec, trunk.spec.layers
        widest = max((0 if one.up is None else len(one.up) for one in rankings.values()), default=0)
        scale, shift, ones = np.zeros(layers, np.float32), np.zeros(layers, np.float32), np.ones(spec.hidden_size, np.float32)
        tables = np.zeros((layers, ahead.COLUMNS), dtype=np.int64)
        for layer, one in rankings.items():
            scale[layer], shift[layer] = one.scale, one.shift
            self._fill(tables[layer], one)
        named = min(spec.top_k + EXTRA, spec.num_experts)
        self.heads = ahead.Heads(
            tables=tables,
            scale=scale,
            shift=shift,
            pace=np.zeros(layers),
            named=named,
            ones=ones,
            normed=np.zeros((rows, spec.hidden_size), np.float32),
            both=np.zeros((rows, padded(spec.num_experts + widest)), np.float32),
            seen=np.zeros(rows * widest, np.float32),
            logits=np.zeros((rows, padded(spec.num_experts)), np.float32),
            missed=np.zeros(spec.num_experts),
            best=np.zeros(named, dtype=np.int64),
            taken=np.zeros(spec.num_experts, dtype=bool),
            task=np.zeros(ahead.NUMBERS, dtype=np.int64),
        )

    @property
    def naming(self) -> bool:
        """Whether the step that was begun is to name experts."""
        return self._hints is not None and self._hints.naming

    def stamp(self, stamps: StepStamps, layer: int, own_ns: int, chosen: int, named: int, found: int) -> None:
        """Writes down what a layer's naming took of the step, and what it came to; 0 ns: foresight named before the step."""
        assert self._hints is not None
        if own_ns:
            stamps.lookahead(layer, own_ns, 0)
        if named:
            stamps.hints(layer, chosen, named, found, 0, 0, 0, 0, *((named, found) if own_ns else (0, 0)))
            self._hints.sent += 1

    def _fill(self, row: Longs, one: Ranking) -> None:
        second, offset = Packed.of(one.second.bfloat16()), one.offset.float().contiguous()
        row[[ahead.SECOND, ahead.SECOND_KIND, ahead.OFFSET]] = second.memory.data_ptr(), second.kind, offset.data_ptr()
        self._kept += [second, offset]
        if one.up is not None:
            up = Packed.of(one.up.bfloat16())
            row[[ahead.UP, ahead.UP_KIND, ahead.WIDTH]] = up.memory.data_ptr(), up.kind, up.inputs
            self._kept.append(up)
