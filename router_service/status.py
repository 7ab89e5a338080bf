"""What a router says about itself: Describe, GetStats, and the approximations of its answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

from forefetch.rounding import SHADOW
from forefetch.spec import ModelSpec
from forefetch.telemetry.hints import layer_hints
from forefetch.telemetry.metrics import RouterMetrics
from forefetch.telemetry.ring import StepRing
from forefetch.v1 import router_pb2
from forefetch.version import VERSION
from router_service.admission import Limits
from router_service.config import RouterConfig
from router_service.hints import Hints
from router_service.kv import KvSide
from router_service.scheduler import Scheduler
from router_service.sizing import Placement
from router_service.workers import Worker, Workers


@dataclass
class Status:
    """Reads the parts; changes nothing."""

    config: RouterConfig
    spec: ModelSpec
    digest: str
    placement: Placement
    limits: Limits
    scheduler: Scheduler
    workers: Workers
    metrics: RouterMetrics
    kv: KvSide | None
    hints: Hints | None
    ring: StepRing
    started: float = field(default_factory=monotonic)

    def approximations(self, shadow_experts: int) -> router_pb2.Approximations:
        """Everything that this router does not compute exactly as the checkpoint says; shadow_experts: of this answer."""
        return router_pb2.Approximations(
            kv_format=self.placement.approximate_kv,
            expert_format="" if self.config.experts == "stored" else self.config.experts,
            trunk_format="" if self.config.trunk == "stored" else self.config.trunk,
            shadow_experts=shadow_experts,
            shadow_format=SHADOW if self.config.miss == "shadow" else "",
        )

    def describe(self) -> router_pb2.DescribeResponse:
        """Model, limits, workers."""
        dtype = str(self.placement.dtype).removeprefix("torch.").upper()
        return router_pb2.DescribeResponse(
            model=self.spec.name,
            model_digest=self.digest,
            family=self.spec.family,
            context_length=self.limits.context,
            vocab_size=self.spec.vocab_size,
            default_max_tokens=self.config.default_max_tokens,
            max_waiting=self.config.max_waiting,
            max_batch=self.config.max_batch,
            kv_format=self.placement.kv_name,
            kv_parameters=self.placement.kv_parameters,
            page_size=self.config.page_size,
            device=str(self.placement.device),
            dtype=f"DATA_TYPE_{dtype}",
            workers=map(_worker, self.workers.known),
            version=VERSION,
        )

    def stats(self) -> router_pb2.GetStatsResponse:
        """Counters and gauges. Called from any thread."""
        stats = router_pb2.GetStatsResponse(
            uptime_s=monotonic() - self.started,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages_total=self.scheduler.pool.total - 1,
            pages_used=self.scheduler.pool.used,
            workers=map(_worker, self.workers.known),
            p2p_steps=self.workers.lanes.steps,
            p2p_breaks=self.workers.lanes.breaks,
        )
        if self.workers.lanes.up:
            for worker in stats.workers:
                worker.link = "p2p"
        stats.hints.CopyFrom(self._hints(self.hints))
        for layer in self.spec.moe_layers:
            stats.expert_load.add(layer=layer, pairs=self.workers.load[layer].tolist())
        if self.kv is not None:
            stats.kv.CopyFrom(self.kv.status())
        self.metrics.fill(stats)
        return stats

    def _hints(self, hints: Hints | None) -> router_pb2.HintStats:
        """Without heads workers still tell what was not where it was needed."""
        layers = layer_hints(self.ring, self.spec.moe_layers)
        if hints is None:
            return router_pb2.HintStats(setting="off", mode="off", layers=layers)
        return router_pb2.HintStats(
            setting=hints.setting,
            mode=hints.mode,
            trained=hints.trained,
            sent=hints.sent,
            dropped=hints.dropped,
            failures=hints.failures,
            layers=layers,
        )


def _worker(worker: Worker) -> router_pb2.WorkerStatus:
    link = worker.link
    status = router_pb2.WorkerStatus(
        address=worker.address,
        up=link is not None,
        reconnects=max(worker.reconnects, 0),
        pairs=worker.pairs,
        calls=worker.calls,
    )
    if link is not None:
        status.link = link.kind
        status.experts = sum(len(experts) for experts in link.info.layers.values())
        status.shard, status.shards = link.info.shard, link.info.shards
    return status
