"""`--miss shadow` on a CPU: an expert that is in no slot when a call needs it is evaluated from a copy of it in fewer bits.

An approximation, and one that depends on which copies came in time, so answers need not repeat. It is counted
(`Verified.shadowed`) and every answer names it. What was evaluated so comes into a slot behind the call, if it is used often
enough.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expert_worker.convert import Shard, fill
from expert_worker.experts import Experts, Storage
from expert_worker.host import Host
from expert_worker.pool import Pool
from expert_worker.slots import uses_of
from expert_worker.visit import Visit
from forefetch.kernels.grouped_mlp import Pairs, evaluation
from forefetch.kernels.grouped_mlp.formats import ExpertFormat
from forefetch.rounding import SHADOW
from forefetch.spec import ModelSpec
from forefetch.weights import Checkpoint
from forefetch.wire import LayerCall, Verified


class ShadowedExperts(Experts):
    """`Experts` with fewer slots than experts. Memory: as theirs, the shadows, and one slot more."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, held: Any, storage: Storage, **how: Any) -> None:
        """See Experts."""
        super().__init__(spec, checkpoint, held, storage, **how)
        format = ExpertFormat(SHADOW)
        self._shadows = Host(len(self.members), spec.hidden_size, spec.expert_width, format, pinned=False)
        fill(self._shadows, Shard(spec, checkpoint, self.members), storage.cache, how.get("on_progress", _quiet))

    def _pool(self, count: int, spec: ModelSpec, storage: Storage, dtype: torch.dtype) -> Pool:
        """The last slot is nobody's: shadows are unpacked there."""
        return super()._pool(count + 1, spec, storage, dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in slots, in host memory and of shadows."""
        return super().weight_bytes + self._shadows.blobs.nbytes

    def _evaluate(self, call: LayerCall, layer: int, pairs: Pairs, out: Tensor, source: str) -> tuple[int, Verified]:
        assert self.residency is not None
        one = evaluation(call.x.to(self._device), pairs, self.pool.weights)
        uses = uses_of(pairs.counts, call.form.sizes[0])
        with Visit(
            self.residency, (source, call.step, layer), pairs.experts, uses, lambda missing, under_way: missing
        ) as visit:
            self._run_waves(one, pairs.experts, visit)
            scratch = len(self.pool.memory) - 1
            for expert in visit.elsewhere:
                self.pool.fill(scratch, self._shadows.blob(expert), self._shadows.format)
                one.run([pairs.experts.index(expert)], [scratch])
        one.combine(out)
        return visit.stall_ns, visit.verified()._replace(shadowed=len(visit.elsewhere))


def _quiet(done: int, total: int) -> None:
    pass
