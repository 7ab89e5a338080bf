"""A cluster on this host: starts, watches, restarts and stops the services as processes. No torch, no gRPC.

with Cluster.start(ClusterConfig(model="models/reference", workers=2)) as cluster:
    Client(cluster.address)
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from forefetch.cluster_config import ClusterConfig
from forefetch.errors import ConfigError, Unavailable
from forefetch.process import Process
from forefetch.settings import child_environment

__all__ = ["MALLOC", "Cluster", "ClusterConfig", "Extra"]

OnLine = Callable[[str, str], None]
OnLoading = Callable[[str, int, int], None]

STOP_S = 5.0
POLL_S = 0.2
BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_S = 60.0
"""A service that lived this long is restarted without delay the next time."""

# glibc gives large blocks back to the kernel after every message and fetches them again for the next, page by page; with these
# it keeps them. Measured on 1 MiB gRPC streams: 4.7 -> 2.2 ms.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "268435456", "MALLOC_TOP_PAD_": "16777216"}


@dataclass(frozen=True)
class Extra:
    """More flags for the services than ClusterConfig has, for tests and benchmarks."""

    router: Sequence[str] = ()
    worker: Sequence[str] = ()
    kv: Sequence[str] = ()


@dataclass
class _Watched:
    """What the watch knows about a service: when it may start again, and how often it failed lately."""

    failures: int = 0
    due: float | None = None
    started: float = field(default_factory=time.monotonic)
    reported: bool = True


class Cluster:
    """Running services by name: "router", "worker-0", "worker-1", ..., "kv". Use as a context manager, or call `stop`."""

    def __init__(self, config: ClusterConfig, extra: Extra, on_line: OnLine | None, on_loading: OnLoading | None) -> None:
        self.config = config
        self.processes: dict[str, Process] = {}
        self._extra, self._on_line, self._on_loading = extra, on_line, on_loading
        self._watched: dict[str, _Watched] = {}

    @classmethod
    def start(
        cls,
        config: ClusterConfig,
        *,
        extra: Extra | None = None,
        on_line: OnLine | None = None,
        on_loading: OnLoading | None = None,
    ) -> Cluster:
        """Starts everything and returns when the router serves. Raises ConfigError, or Unavailable with the last words of a
        service that did not come up; nothing is left running then.

        on_line(name, line): a line that a service logged. on_loading(name, done, total): how far it has come; (name, 0, 0)
        when it starts and (name, 1, 1) when it is ready."""
        config.validate()
        config = config.resolved()
        config.check_model()
        cluster = cls(config, extra or Extra(), on_line, on_loading)
        try:
            cluster._start()
        except BaseException:
            cluster.stop(grace_s=0.0)
            raise
        return cluster

    @property
    def address(self) -> str:
        """host:port of the router."""
        return self.processes["router"].address

    @property
    def worker_names(self) -> list[str]:
        """Names of the workers' processes, by shard; none with link local."""
        return [] if self.config.link == "local" else [f"worker-{shard}" for shard in range(self.config.workers)]

    def _start(self) -> None:
        until = time.monotonic() + self.config.start_s
        listen = self.config.listen or f"127.0.0.1:{self.config.port}"
        _check_free("--listen" if self.config.listen else "--port", listen)
        if self.config.metrics_port:
            _check_free("--metrics-port", f"127.0.0.1:{self.config.metrics_port}")
        for shard, name in enumerate(self.worker_names):
            self._spawn(name, "expert_worker", self._worker_flags(shard), self._threads(len(self.worker_names)))
        if self.config.kv:
            where = [f"--dir={Path(self.config.kv_dir).resolve()}"] if self.config.kv_dir else []
            flags = [f"--otlp-endpoint={self.config.otlp_endpoint}", f"--nice={self.config.kv_nice}", *where, *self._extra.kv]
            self._spawn("kv", "kv_service", flags, 1)
        self._wait_ready(list(self.processes.values()), until)
        self._spawn("router", "router_service", self._router_flags(), self._threads(1), listen)
        self._wait_ready([self.processes["router"]], until)

    def _wait_ready(self, processes: Sequence[Process], until: float) -> None:
        """Looks at all of them in turn, so that one that ends is told of while others still load."""
        while late := [process for process in processes if not process.ready]:
            for process in late:
                if not process.running or time.monotonic() > until:
                    process.wait_ready(0.0)
            time.sleep(0.02)

    def _spawn(self, name: str, module: str, flags: Sequence[str], threads: int, listen: str = "127.0.0.1:0") -> None:
        environment = _environment(threads, alone=self.config.link == "local")
        environment |= self.config.visible(environment.get("CUDA_VISIBLE_DEVICES"))
        process = Process(name, module, flags, environment, listen=listen, on_line=self._on_line, on_loading=self._on_loading)
        self.processes[name] = process
        self._watched[name] = _Watched()
        process.spawn()

    def _threads(self, sharers: int) -> int:
        return max(1, len(os.sched_getaffinity(0)) // sharers)

    def _model_flags(self, place: int) -> list[str]:
        config = self.config
        synthetic = ["--allow-synthetic"] if config.allow_synthetic else []
        return [
            f"--model={config.model}",
            f"--device={config.device_of(place)}",
            f"--otlp-endpoint={config.otlp_endpoint}",
            *synthetic,
        ]

    def _worker_flags(self, shard: int) -> list[str]:
        part = [f"--shard={shard + self.config.spread}", f"--shards={self.config.shards}"]
        if self.config.inherit:
            return [f"--device={self.config.device_of(shard + 1)}", *part, *self._extra.worker]
        shards = [*part, f"--slots={self.config.slots}"]
        shards += [f"--miss={self.config.miss}", f"--experts={self.config.experts}", f"--placement={self.config.placement}"]
        shards += ["--placed"] if self.config.planned else []
        return [*self._model_flags(shard + 1), *shards, *self._extra.worker]

    def _router_flags(self) -> list[str]:
        config = self.config
        own = ["local"] if config.spread or config.link == "local" else []
        workers = ",".join([*own, *(self.processes[name].address for name in self.worker_names)])
        if config.inherit:
            link = [] if config.link == "local" else [f"--link={config.link}"]
            place = [f"--device={config.device_of(0)}", f"--workers={workers}", f"--drain-s={config.drain_s}"]
            return [*place, *link, *self._extra.router]
        flags = [
            f"--experts={config.experts}",
            f"--trunk={config.trunk}",
            f"--workers={workers}",
            f"--kv-format={config.kv_format}",
            f"--hints={config.hints}",
            f"--drain-s={config.drain_s}",
        ]
        if config.planned:
            flags.append("--plan")
        if config.kv:
            flags.append(f"--kv={self.processes['kv'].address}")
        if config.metrics_port:
            flags.append(f"--metrics-listen=127.0.0.1:{config.metrics_port}")
        flags += [f"--slots={config.slots}"] if own else []
        flags += [] if config.link == "local" else [f"--link={config.link}"]
        flags += [f"--miss={config.miss}"] if own or config.miss == "shadow" else []
        return [*self._model_flags(0), *flags, *self._extra.router]

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a service and, when it is SIGKILL, waits until it has gone."""
        self.processes[name].signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait(STOP_S)

    def restart(self, name: str) -> None:
        """Starts a service again on its old port, ending it first if it still runs. Returns when it is ready, which may take as
        long as at the start. Raises Unavailable."""
        process = self.processes[name]
        process.end(STOP_S)
        process.spawn()
        process.wait_ready(self.config.start_s)

    def check(self) -> Iterator[str]:
        """One look at every service: yields a line for a person about each that died, is being restarted or is back.

        A worker or the KV service is started again, later after each failure; a dead router raises Unavailable."""
        now = time.monotonic()
        for name, process in self.processes.items():
            watched = self._watched[name]
            if process.running:
                if not watched.reported and process.ready:
                    watched.reported = True
                    yield f"{name} is back"
            elif name == "router":
                raise Unavailable(f"the router {process.ending()}")
            elif watched.due is None:
                yield self._schedule(process, watched, now)
            elif now >= watched.due:
                watched.due, watched.started = None, now
                process.end(0.0)
                process.spawn()

    def _schedule(self, process: Process, watched: _Watched, now: float) -> str:
        watched.failures = 1 if now - watched.started > STEADY_S else watched.failures + 1
        delay = BACKOFF_S[min(watched.failures, len(BACKOFF_S)) - 1]
        watched.due, watched.reported = now + delay, False
        return f"{process.name} {process.ending()}; starting it again in {delay:g} s"

    def watch(self, report: Callable[[str], None]) -> None:
        """Looks after the services until the router dies (Unavailable) or the caller's thread is interrupted."""
        while True:
            for line in self.check():
                report(line)
            time.sleep(POLL_S)

    def stop(self, grace_s: float | None = None) -> None:
        """The router first, which gets `grace_s` (None: --drain-s) to finish running requests, then the others. May be called
        twice."""
        grace_s = self.config.drain_s if grace_s is None else grace_s
        router = self.processes.get("router")
        if router:
            router.end(grace_s + STOP_S if grace_s else 0.0)
        others = [process for process in self.processes.values() if process is not router]
        for process in others:
            process.signal(signal.SIGTERM if grace_s else signal.SIGKILL)
        for process in others:
            process.end(STOP_S)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop(None if kind is None else 0.0)


def _check_free(flag: str, address: str) -> None:
    """ConfigError for an address that is taken, before minutes go into loading. What else is wrong with it the router says."""
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError), socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port whose last owner just went is free
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"{flag}: {address} is in use") from None
            raise


def _environment(threads: int, *, alone: bool) -> dict[str, str]:
    """This process's environment with allocator and thread settings for a service; what the user has set stays."""
    # gRPC's own lines about connections that come and go would drown what the services say.
    wanted = {**MALLOC, "OMP_NUM_THREADS": str(threads), "GRPC_VERBOSITY": "ERROR"}
    if not alone:
        # Threads that spin after a parallel region would take the cores from the process whose turn it is.
        wanted["OMP_WAIT_POLICY"] = "PASSIVE"
    return {**wanted, **child_environment()}
