"""Starts a router: `python -m router_service --model DIR --workers host:port,host:port`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from forefetch import rpc, settings
from forefetch.rpc.auth import Authenticator
from forefetch.spec import ModelSpec
from forefetch.synthetic import open_model
from forefetch.telemetry import names
from forefetch.telemetry.book import RequestBook
from forefetch.telemetry.metrics import SpanMetrics, new_registry
from forefetch.telemetry.ring import StepRing
from forefetch.telemetry.spans import Exporter
from forefetch.v1 import router_pb2_grpc
from router_service import build, models
from router_service.asking import Reader
from router_service.callers import Callers
from router_service.config import RouterConfig
from router_service.engine import Engine
from router_service.flight import Parts
from router_service.outgoing import Outgoing
from router_service.p2p import LaneTrunk
from router_service.placing import Placing, planned_list
from router_service.recorder import Recorder
from router_service.server import Deliverer, RouterServicer
from router_service.sizing import Placement, Sizes
from router_service.status import Status
from router_service.text import Text
from router_service.workers import Workers

SERVICE = "forefetch.v1.RouterService"
MOST_BYTES = 8 << 20
"""Of a message from a user: texts may have 4 MiB, and a million token ids take less."""


async def serve(config: RouterConfig) -> None:
    """Builds the router, waits until its workers hold every expert, and serves until a signal."""
    spec, checkpoint = open_model(config.model, allow_synthetic=config.allow_synthetic)
    placement = Placement.of(config, spec)
    sizes = Sizes.of(config, spec, placement)
    limits = build.limits(config, spec, sizes.context)
    dispatch = build.dispatch(config, spec, checkpoint, placement)  # connects while the trunk loads
    trunk = await asyncio.to_thread(build.trunk, config, spec, checkpoint, sizes, placement)
    scheduler = build.scheduler(config, sizes, placement)
    registry = new_registry()
    recorder = _recorder(config, spec, dispatch.workers, registry)
    kv_parts = (config, spec, checkpoint.digest, placement, trunk, scheduler.pool, recorder.exporter)
    kv = build.kv(*kv_parts) if config.kv else None
    hints = build.hints(config, trunk, checkpoint.digest, dispatch)
    parts = Parts(trunk, build.buffers(config, sizes, placement), dispatch, dispatch.workers, scheduler, recorder, kv, hints)
    engine = Engine(parts, Outgoing(Deliverer(asyncio.get_running_loop())), config.worker_grace_s)
    shown = (config, spec, checkpoint.digest, placement, limits, scheduler)
    status = Status(*shown, dispatch.workers, recorder.metrics, kv, hints, recorder.ring)
    recorder.metrics.export(status.stats)
    SpanMetrics(registry, recorder.exporter)
    reader = Reader(limits, Text.load(Path(config.model)))
    conversations = build.conversations(checkpoint.digest, reader, kv)
    if kv is not None:
        kv.sessions.fence = engine.fail
    callers = Callers(config.max_streams, config.unread_s)
    servicer = RouterServicer(engine, reader, conversations, recorder, status, Authenticator.of(config), callers)
    server = await rpc.serve_aio(
        config,
        SERVICE,
        lambda server: router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server),
        on_drain=engine.drain,
        busy=lambda: engine.busy or len(callers) > 0,
        registry=registry,
        vitals=_vitals(engine, config.step_timeout_s),
        loaded=True,
        most_bytes=MOST_BYTES,
    )
    try:
        with _followed(config, dispatch.workers):
            await asyncio.to_thread(dispatch.workers.wait_complete, config.start_timeout_s)
            made = partial(models.model, trunk, parts.buffers, dispatch.workers, config, hints, engine.outgoing)
            parts.trunk = await asyncio.to_thread(made)
            rpc.settle()
            engine.start()
            await server.run()
            await asyncio.to_thread(engine.stop)
    finally:
        await server.stop()
        if isinstance(parts.trunk, LaneTrunk):
            parts.trunk.close()
        dispatch.workers.close()
        if hints is not None:
            hints.close()
        if kv is not None:
            kv.close(timeout_s=2.0)
        recorder.exporter.close()


@contextmanager
def _followed(config: RouterConfig, workers: Workers) -> Iterator[None]:
    """Keeps the table of workers up to date where they come and go, or what they hold does."""
    if config.service is not None:
        from router_service.discovery import Discovery  # brings the Kubernetes client, which most routers do not need

        following: Discovery | Placing = Discovery(config, workers)
    elif config.plan:
        following = planned_list(config, workers)
    else:
        yield
        return
    try:
        yield
    finally:
        following.close()


def _vitals(engine: Engine, step_timeout_s: float) -> rpc.Vitals:
    """Ready while every expert has a worker; alive while steps follow one another. A lost worker is no illness of ours."""
    pulse = rpc.Pulse(lambda: engine.progress, lambda: engine.working, max(60.0, 3 * step_timeout_s))
    return rpc.Vitals(ready=lambda: engine.ready, alive=lambda: engine.running and pulse())


def _recorder(config: RouterConfig, spec: ModelSpec, workers: Workers, registry: CollectorRegistry) -> Recorder:
    ring = StepRing(max(2, config.trace_steps), spec.layers, len(workers.names))
    book = RequestBook(ring, config.trace_requests, workers.names)
    exporter = Exporter(config, names.SERVICE_ROUTER, book=book, model=spec.name)
    return Recorder(ring, book, model=spec.name, registry=registry, exporter=exporter)


def main() -> int:
    """Entry point of the process."""
    config = settings.parse(RouterConfig)
    rpc.setup_logging(config.log_level)
    if config.threads:
        torch.set_num_threads(config.threads)
    return rpc.run_main(config.PROG, lambda: asyncio.run(serve(config)))


if __name__ == "__main__":
    sys.exit(main())
