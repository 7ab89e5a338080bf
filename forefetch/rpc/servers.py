"""Servers: bind, health, reflection, metrics, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from forefetch.errors import ConfigError
from forefetch.rpc.channels import server_credentials, server_options, tls_of
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
# How long `stop` waits for gRPC, seconds.
_STOP_S = 5.0
# Once `run` has returned, the rest of the process has this long to end, seconds.
_LAST_RESORT_S = 10.0


def _bind(config: ServiceConfig, server: Any) -> str:
    """Adds config.listen to a sync or asyncio server; host:port with the port that was taken."""
    tls = tls_of(config)
    try:
        if tls is not None and tls.cert:
            port = server.add_secure_port(config.listen, server_credentials(tls))
        else:
            port = server.add_insecure_port(config.listen)
    except RuntimeError:
        raise ConfigError(
            f"--listen: cannot serve on {config.listen}: the port is in use, or the address is not ours"
        ) from None
    return f"{config.listen.rpartition(':')[0]}:{port}"


def _start_metrics(config: ServiceConfig, registry: CollectorRegistry | None) -> tuple[str, Any]:
    if not config.metrics_listen or registry is None:
        return "", None
    from prometheus_client import start_http_server

    host, _, port = config.metrics_listen.rpartition(":")
    try:
        httpd, _thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise ConfigError(f"--metrics-listen: cannot serve on {config.metrics_listen}: {error.strerror}") from None
    return f"{host}:{httpd.server_port}", httpd


def _enable_reflection(config: ServiceConfig, names: Sequence[str], server: Any) -> None:
    if not config.reflection:
        return
    from grpc_health.v1 import health
    from grpc_reflection.v1alpha import reflection

    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)


def _health_states(name: str, serving: bool) -> Iterator[tuple[str, Any]]:
    """The empty name, the service and "readiness" say whether calls are welcome; "liveness" that the process works at all."""
    from grpc_health.v1.health_pb2 import HealthCheckResponse

    for service in ("", name, "readiness"):
        yield service, HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
    yield "liveness", HealthCheckResponse.SERVING


def _leave_soon(delay_s: float) -> None:
    """Ends the process in `delay_s` whatever its threads do: a stuck handler must not keep a terminated process alive."""

    def leave() -> None:
        time.sleep(delay_s)
        _log.error("threads did not end in time; leaving")
        os._exit(1)

    threading.Thread(target=leave, daemon=True, name="last-resort").start()


class _Served:
    """What both kinds of server have. `address` is host:port, `metrics` that of /metrics or ""."""

    def __init__(
        self,
        config: ServiceConfig,
        name: str,
        server: grpc.Server | grpc.aio.Server,
        on_drain: Callable[[], None] | None,
        busy: Callable[[], bool] | None,
        registry: CollectorRegistry | None,
    ) -> None:
        self.address = _bind(config, server)
        self.metrics, self._httpd = _start_metrics(config, registry)
        self._name, self._drain_s, self._on_drain, self._busy = name, config.drain_s, on_drain, busy
        self._signals = 0

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
        self.set_serving(False)
        server.start()

    def set_serving(self, serving: bool) -> None:
        """What health says from now on."""
        for service, state in _health_states(self._name, serving):
            self._health.set(service, state)

    def run(self) -> None:
        """SERVING, the ready line; returns after SIGTERM or SIGINT and the drain. Call it on the main thread."""
        previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            self.set_serving(True)
            announce(self.address, self.metrics)
            # Python runs handlers on the main thread only, and a signal may be delivered to one of gRPC's: wake up to look.
            while not self._signals:
                time.sleep(0.1)
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
) -> SyncServer:
    """Binds config.listen and starts; health says NOT_SERVING until `run()` or `set_serving(True)`.

    name: full service name, e.g. "forefetch.v1.KvService". register: adds the servicer. on_drain: called first when the
    process shall go. busy: True while work is running; without it a drain waits for every open call, streams that never
    end included. registry: what /metrics shows. Raises ConfigError when an address cannot be taken or a PEM file not be read.
    """
    pool = ThreadPoolExecutor(max_workers, thread_name_prefix=name.rpartition(".")[2])
    server = grpc.server(pool, options=server_options())
    register(server)
    _enable_reflection(config, (name,), server)
    return SyncServer(config, name, server, on_drain, busy, registry)


class AioServer(_Served):
    """A bound asyncio gRPC server."""

    def __init__(self, config: ServiceConfig, name: str, server: grpc.aio.Server, *more: Any) -> None:
        from grpc_health.v1 import health, health_pb2_grpc

        super().__init__(config, name, server, *more)
        self._server, self._health = server, health.aio.HealthServicer()
        self._signalled = asyncio.Event()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    async def set_serving(self, serving: bool) -> None:
        """What health says from now on."""
        for service, state in _health_states(self._name, serving):
            await self._health.set(service, state)

    async def run(self) -> None:
        """SERVING, the ready line; returns after SIGTERM or SIGINT and the drain."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await self.set_serving(True)
            announce(self.address, self.metrics)
            await self._signalled.wait()
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
        await asyncio.to_thread(self._stop_metrics)


async def serve_aio(
    config: ServiceConfig,
    name: str,
    register: Callable[[grpc.aio.Server], None],
    *,
    on_drain: Callable[[], None] | None = None,
    busy: Callable[[], bool] | None = None,
    registry: CollectorRegistry | None = None,
) -> AioServer:
    """`serve_sync` for an asyncio server."""
    server = grpc.aio.server(options=server_options(), interceptors=(Parsing(),))
    register(server)
    _enable_reflection(config, (name,), server)
    served = AioServer(config, name, server, on_drain, busy, registry)
    await served.set_serving(False)
    await server.start()
    return served
