"""Server processes: bind, health, reflection, metrics, the ready line, drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
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
from forefetch.settings import ServiceConfig

# Health, reflection and Prometheus come with the `serve` extra; a client must be able to import this package without them.
if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Once nothing is busy, streams that never end by themselves (health watches) get this long, seconds.
_LINGER_S = 0.5
# Once a process should have gone, this much patience is left for threads that do not end, seconds.
_LAST_RESORT_S = 5.0


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", " | ")


def setup_logging(level: str) -> None:
    """Logs to standard error, one line per record, tracebacks included."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def announce(address: str, metrics: str = "", **more: Any) -> None:
    """Prints the line that whoever started this process waits for."""
    print(json.dumps({"event": "ready", "address": address, "metrics": metrics, **more}), flush=True)


def run_main(prog: str, body: Callable[[], None]) -> int:
    """Runs a service's body: a wrong setting ends it with 2 and one line on standard error."""
    try:
        body()
    except ConfigError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


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
    """ "", the service and "readiness" say whether calls are welcome; "liveness" that the process works at all."""
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


class SyncServer:
    """A bound and started gRPC server with a thread pool. `address` is host:port, `metrics` that of /metrics or ""."""

    def __init__(self, config: ServiceConfig, name: str, server: grpc.Server, address: str, registry: Any) -> None:
        from grpc_health.v1 import health, health_pb2_grpc

        self.address = address
        self.metrics, self._httpd = _start_metrics(config, registry)
        self.on_drain: Callable[[], None] | None = None
        self.busy: Callable[[], bool] | None = None
        self._config, self._name, self._server = config, name, server
        self._signals = 0
        self._health = health.HealthServicer()
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
        until = time.monotonic() + self._config.drain_s
        self.set_serving(False)
        if self.on_drain:
            self.on_drain()
        ended = self._server.stop(self._config.drain_s)
        while self._signals < 2 and time.monotonic() < until and not ended.wait(0.05):
            if self.busy and not self.busy():
                ended.wait(_LINGER_S)
                break
        self.stop()
        if self._signals:
            _leave_soon(_LAST_RESORT_S)

    def stop(self) -> None:
        """Ends everything now."""
        self._server.stop(None).wait(_LAST_RESORT_S)
        if self._httpd is not None:
            self._httpd.shutdown()
            self._httpd.server_close()


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
    served = SyncServer(config, name, server, _bind(config, server), registry)
    served.on_drain, served.busy = on_drain, busy
    return served


class AioServer:
    """A bound and started asyncio gRPC server. `address` is host:port, `metrics` that of /metrics or ""."""

    def __init__(self, config: ServiceConfig, name: str, server: grpc.aio.Server, address: str, registry: Any) -> None:
        from grpc_health.v1 import health, health_pb2_grpc

        self.address = address
        self.metrics, self._httpd = _start_metrics(config, registry)
        self.on_drain: Callable[[], None] | None = None
        self.busy: Callable[[], bool] | None = None
        self._config, self._name, self._server = config, name, server
        self._signals = 0
        self._signalled = asyncio.Event()
        self._health = health.aio.HealthServicer()
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
        until = time.monotonic() + self._config.drain_s
        await self.set_serving(False)
        if self.on_drain:
            self.on_drain()
        stopping = asyncio.ensure_future(self._server.stop(self._config.drain_s))
        while self._signals < 2 and time.monotonic() < until and not stopping.done():
            await asyncio.wait((stopping,), timeout=0.05)
            if self.busy and not self.busy():
                await asyncio.wait((stopping,), timeout=_LINGER_S)
                break
        await self.stop()
        await stopping
        if self._signals:
            _leave_soon(_LAST_RESORT_S)

    async def stop(self) -> None:
        """Ends everything now."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._server.stop(None), _LAST_RESORT_S)
        if self._httpd is not None:
            await asyncio.to_thread(self._httpd.shutdown)
            self._httpd.server_close()


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
    server = grpc.aio.server(options=server_options())
    register(server)
    _enable_reflection(config, (name,), server)
    served = AioServer(config, name, server, _bind(config, server), registry)
    served.on_drain, served.busy = on_drain, busy
    await served.set_serving(False)
    await server.start()
    return served
