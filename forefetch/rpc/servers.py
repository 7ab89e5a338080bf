"""Servers: bind, health, reflection, metrics, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from forefetch.rpc import health as states
from forefetch.rpc.binding import bind, bind_probes, enable_reflection, start_metrics
from forefetch.rpc.channels import MESSAGE_LIMIT, server_options
from forefetch.rpc.failures import Parsing
from forefetch.rpc.program import announce
from forefetch.settings import ServiceConfig

# Health, reflection and Prometheus come with the `serve` extra; a client must be able to import this package without them.
if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Once nothing is busy, streams that never end by themselves (health watches) get this long, seconds.
_LINGER_S = 0.5
# How often health is looked at, seconds.
_LOOK_S = 0.1
# How long `stop` waits for gRPC, seconds.
_STOP_S = 5.0
# Once `run` has returned, the rest of the process has this long to end, seconds.
_LAST_RESORT_S = 10.0


def _leave_soon(delay_s: float) -> None:
    """Ends the process in `delay_s` whatever its threads do: a stuck handler must not keep a terminated process alive."""

    def leave() -> None:
        time.sleep(delay_s)
        _log.error("threads did not end in time; leaving")
        os._exit(1)

    threading.Thread(target=leave, daemon=True, name="last-resort").start()


class _Served:
    """What both kinds of server have. `address` is host:port; `metrics` and `probes` those of /metrics and of health, or ""."""

    def __init__(
        self,
        config: ServiceConfig,
        name: str,
        server: grpc.Server | grpc.aio.Server,
        on_drain: Callable[[], None] | None,
        busy: Callable[[], bool] | None,
        registry: CollectorRegistry | None,
        vitals: states.Vitals | None,
    ) -> None:
        self.address = bind(config, server)
        self.metrics, self._httpd = start_metrics(config, registry)
        self._name, self._drain_s, self._on_drain, self._busy = name, config.drain_s, on_drain, busy
        self._states = states.States(name, vitals or states.Vitals())
        self.probes = ""
        self._signals = 0

    def _announce(self) -> None:
        announce(self.address, self.metrics, **({"health": self.probes} if self.probes else {}))

    def _begin_drain(self) -> float:
        """When it must be over."""
        if self._on_drain:
            self._on_drain()
        return time.monotonic() + self._drain_s

    def _idle(self) -> bool:
        return self._busy is not None and not self._busy()

    def _stop_metrics(self) -> None:
        if self._httpd is not None:
            self._httpd.shutdown()
            self._httpd.server_close()
            self._httpd = None


class SyncServer(_Served):
    """A bound and started gRPC server with a thread pool."""

    def __init__(self, config: ServiceConfig, name: str, server: grpc.Server, *more: Any) -> None:
        from grpc_health.v1 import health, health_pb2_grpc

        super().__init__(config, name, server, *more)
        self._server, self._health = server, health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._probe_server: grpc.Server | None = None
        if config.health_listen:
            self._probe_server = grpc.server(ThreadPoolExecutor(2, thread_name_prefix="probes"), options=server_options())
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probe_server)
            self.probes = bind_probes(config.health_listen, self._probe_server)
            self._probe_server.start()
        self.set_serving(False)
        server.start()

    def set_serving(self, serving: bool) -> None:
        """Whether calls are welcome from now on, as far as the server is concerned; the service's vitals have their say too."""
        self._states.accepting = serving
        self._look()

    def _look(self) -> None:
        for service, state in self._states.changes():
            self._health.set(service, state)

    def run(self) -> None:
        """SERVING, the ready line; returns after SIGTERM or SIGINT and the drain. Call it on the main thread."""
        previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            self._states.loaded = True
            self.set_serving(True)
            self._announce()
            # Python runs handlers on the main thread only, and a signal may be delivered to one of gRPC's: wake up to look.
            while not self._signals:
                time.sleep(_LOOK_S)
                self._look()
            self.drain()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            signal.signal(number, signal.SIG_DFL)

    def drain(self) -> None:
        """Refuses new calls, waits up to drain_s (or a second signal) for running ones, ends the rest with UNAVAILABLE."""
        self.set_serving(False)
        until = self._begin_drain()
        ended = self._server.stop(self._drain_s)
        while self._signals < 2 and time.monotonic() < until and not ended.wait(0.05):
            if self._idle():
                ended.wait(_LINGER_S)
                break
        self.stop()
        if self._signals:
            _leave_soon(_LAST_RESORT_S)

    def stop(self) -> None:
        """Ends everything now."""
        self._server.stop(None).wait(_STOP_S)
        if self._probe_server is not None:
            self._probe_server.stop(None).wait(_STOP_S)
        self._stop_metrics()


def serve_sync(
    config: ServiceConfig,
    name: str,
    register: Callable[[grpc.Server], None],
    *,
    max_workers: int,
    on_drain: Callable[[], None] | None = None,
    busy: Callable[[], bool] | None = None,
    registry: CollectorRegistry | None = None,
    vitals: states.Vitals | None = None,
) -> SyncServer:
    """Binds config.listen and starts; health says NOT_SERVING until `run()` or `set_serving(True)`.

    name: full service name, e.g. "forefetch.v1.KvService". register: adds the servicer. on_drain: called first when the
    process shall go. busy: True while work is running; without it a drain waits for every open call, streams that never
    end included. registry: what /metrics shows. Raises ConfigError when an address cannot be taken or a PEM file not be read.
    """
    pool = ThreadPoolExecutor(max_workers, thread_name_prefix=name.rpartition(".")[2])
    server = grpc.server(pool, options=server_options())
    register(server)
    enable_reflection(config, (name,), server)
    return SyncServer(config, name, server, on_drain, busy, registry, vitals)


class AioServer(_Served):
    """A bound asyncio gRPC server."""

    def __init__(self, config: ServiceConfig, name: str, server: grpc.aio.Server, *more: Any) -> None:
        from grpc_health.v1 import health, health_pb2_grpc

        super().__init__(config, name, server, *more)
        self._server, self._health = server, health.aio.HealthServicer()
        self._signalled = asyncio.Event()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._probe_server: grpc.aio.Server | None = None
        if config.health_listen:
            self._probe_server = grpc.aio.server(options=server_options())
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probe_server)
            self.probes = bind_probes(config.health_listen, self._probe_server)

    async def start(self, *, loaded: bool) -> None:
        """Takes calls from now on. loaded: what `startup` says already, before `run`."""
        self._states.loaded = loaded
        await self.set_serving(False)
        await self._server.start()
        if self._probe_server is not None:
            await self._probe_server.start()

    async def set_serving(self, serving: bool) -> None:
        """As that of SyncServer."""
        self._states.accepting = serving
        await self._look()

    async def _look(self) -> None:
        for service, state in self._states.changes():
            await self._health.set(service, state)

    async def run(self) -> None:
        """SERVING, the ready line; returns after SIGTERM or SIGINT and the drain."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            self._states.loaded = True
            await self.set_serving(True)
            self._announce()
            while not self._signals:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._signalled.wait(), _LOOK_S)
                await self._look()
            await self.drain()
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        self._signalled.set()
        if self._signals > 1:
            asyncio.get_running_loop().remove_signal_handler(number)

    async def drain(self) -> None:
        """Refuses new calls, waits up to drain_s (or a second signal) for running ones, ends the rest with UNAVAILABLE."""
        await self.set_serving(False)
        until = self._begin_drain()
        stopping = asyncio.ensure_future(self._server.stop(self._drain_s))
        while self._signals < 2 and time.monotonic() < until and not stopping.done():
            await asyncio.wait((stopping,), timeout=0.05)
            if self._idle():
                await asyncio.wait((stopping,), timeout=_LINGER_S)
                break
        await self.stop()
        await stopping
        if self._signals:
            _leave_soon(_LAST_RESORT_S)

    async def stop(self) -> None:
        """Ends everything now."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._server.stop(None), _STOP_S)
        if self._probe_server is not None:
            await self._probe_server.stop(None)
        await asyncio.to_thread(self._stop_metrics)


async def serve_aio(
    config: ServiceConfig,
    name: str,
    register: Callable[[grpc.aio.Server], None],
    *,
    on_drain: Callable[[], None] | None = None,
    busy: Callable[[], bool] | None = None,
    registry: CollectorRegistry | None = None,
    vitals: states.Vitals | None = None,
    loaded: bool = False,
    most_bytes: int = MESSAGE_LIMIT,
) -> AioServer:
    """`serve_sync` for an asyncio server. loaded: the model is there already, only others are still waited for. most_bytes: of
    a message to it, which is read on the event loop's thread."""
    server = grpc.aio.server(options=server_options(most_bytes), interceptors=(Parsing(),))
    register(server)
    enable_reflection(config, (name,), server)
    served = AioServer(config, name, server, on_drain, busy, registry, vitals)
    await served.start(loaded=loaded)
    return served
