"""All of a model's experts in this process's memory, each in its slot, for a router that evaluates whole steps on a CPU."""

from __future__ import annotations

import numpy as np

from expert_worker.core import Core
from expert_worker.experts import Experts
from forefetch.kernels.compiled.step import Experts as Room
from forefetch.kernels.grouped_mlp.cpu import KINDS


class WholeExperts:
    """Beside `Core.forward`, not at the same time: evaluates nothing itself, says where everything is and keeps the counts."""

    def __init__(self, core: Core, experts: Experts) -> None:
        self._core, self._experts = core, experts

    @staticmethod
    def of(core: Core) -> WholeExperts | None:
        """None when experts come and go, when some are elsewhere, or when the kernels do not take them."""
        experts = core.experts
        if not isinstance(experts, Experts) or experts.residency is not None or experts.shelf is not None:
            return None
        kept, computed = experts.pool.memory, core.info.dtype.itemsize == 4
        fits = computed and not kept.is_cuda and experts.pool.dtype in KINDS and bool((experts.numbers >= 0).all())
        return WholeExperts(core, experts) if fits else None

    def room(self, rows: int) -> Room:
        """The addresses of the experts, and memory for steps of up to so many rows."""
        experts, weights = self._experts, self._experts.pool.weights
        w13, w2 = weights.w13, weights.w2
        number = experts.numbers.astype(np.int64)
        pairs, size = rows * experts.top_k, w13.element_size()
        shapes = (pairs, 2 * weights.width), (pairs, weights.width), (pairs, weights.hidden)
        hidden, active, result = (np.zeros(shape, dtype=np.float32) for shape in shapes)
        return Room(
            pool=w13.data_ptr(),
            strides=np.array((w13.stride(0) * size, w2.data_ptr() - w13.data_ptr())),
            kind=int(KINDS[w13.dtype]),
            number=number,
            load=experts.load,
            rows=np.zeros(pairs, dtype=np.int64),
            place=np.zeros(pairs, dtype=np.int64),
            first=np.zeros(number.shape[1] + 1, dtype=np.int64),
            begins=np.arange(rows) * experts.top_k,
            slots=np.zeros(number.shape[1], dtype=np.int64),
            hidden=hidden,
            active=active,
            result=result,
        )

    def evaluated(self, calls: int, rows: int, pairs: int, compute_ns: int, resident: int) -> None:
        """Counts a step: its layers, rows and pairs of each, and the distinct experts of all."""
        core = self._core
        core.calls += calls
        core.rows += calls * rows
        core.pairs += calls * pairs
        core.compute_ns += compute_ns
        core.verified = core.verified._replace(resident=core.verified.resident + resident)
