"""Channels, servers and error mapping over real sockets, and in real processes where signals are concerned."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import rpc_calls
from rpc_calls import ERRORS, SERVICE, AioCalls, Calls, SyncCalls, add

from forefetch import errors, rpc
from forefetch.errors import ConfigError
from forefetch.rpc import channels, servers
from forefetch.settings import ServiceConfig
from forefetch.v1 import router_pb2 as pb
from forefetch.v1 import router_pb2_grpc as pb_grpc


@dataclass
class Running:
    """A server in this process."""

    address: str
    metrics: str
    calls: Calls

    def stub(self, tls: rpc.Tls | None = None) -> Any:
        return contextlib.closing(Stub(self.address, tls))


class Stub:
    """A stub with the channel to close."""

    def __init__(self, address: str, tls: rpc.Tls | None = None) -> None:
        self.channel = rpc.channel(address, tls)
        self.router = pb_grpc.RouterServiceStub(self.channel)
        self.close = self.channel.close

    def ids(self, text: str, **how: Any) -> list[int]:
        return list(self.router.Tokenize(pb.TokenizeRequest(text=text), timeout=10, **how).ids)

    def tokens(self, text: str) -> int:
        return sum(1 for _ in self.router.Generate(pb.GenerateRequest(text=text), timeout=20))


@contextlib.contextmanager
def serving(kind: str, config: ServiceConfig | None = None, registry: Any = None) -> Iterator[Running]:
    with serving_sync(config, registry) if kind == "sync" else serving_aio(config, registry) as running:
        yield running


@contextlib.contextmanager
def serving_sync(config: ServiceConfig | None, registry: Any) -> Iterator[Running]:
    calls = SyncCalls()
    server = rpc.serve_sync(config or ServiceConfig(), SERVICE, lambda s: add(calls, s), max_workers=4, registry=registry)
    server.set_serving(True)
    try:
        yield Running(server.address, server.metrics, calls)
    finally:
        server.stop()


@contextlib.contextmanager
def serving_aio(config: ServiceConfig | None, registry: Any) -> Iterator[Running]:
    loop, calls = asyncio.new_event_loop(), AioCalls()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(20)

    try:
        server = run(rpc.serve_aio(config or ServiceConfig(), SERVICE, lambda s: add(calls, s), registry=registry))
        try:
            run(server.set_serving(True))
            yield Running(server.address, server.metrics, calls)
        finally:
            run(server.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(params=["sync", "aio"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str) -> Iterator[Running]:
    with serving(kind) as running:
        yield running


# Errors


def assert_same(found: errors.ForefetchError, sent: Exception) -> None:
    assert type(found) is type(sent)
    assert str(found)[:2000] == str(sent)[:2000]
    for name in ("field", "retry_after_s", "worker"):
        assert getattr(found, name, None) == getattr(sent, name, None)


def test_every_error_comes_back_as_it_was(server: Running) -> None:
    with server.stub() as stub:
        for text, sent in ERRORS.items():
            for call in (stub.ids, stub.tokens):
                with pytest.raises(grpc.RpcError) as caught:
                    call(text)
                assert caught.value.code().name == sent.code
                assert_same(rpc.error_of(caught.value), sent)


def test_errors_of_an_asyncio_call() -> None:
    async def call(address: str) -> errors.ForefetchError:
        async with rpc.aio_channel(address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                await pb_grpc.RouterServiceStub(channel).Tokenize(pb.TokenizeRequest(text="busy"), timeout=10)
            return rpc.error_of(caught.value)

    with serving("sync") as server:
        assert_same(asyncio.run(call(server.address)), ERRORS["busy"])


def test_a_defect_keeps_its_text_from_the_client(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with server.stub() as stub:
        for call in (stub.ids, stub.tokens):
            with pytest.raises(grpc.RpcError) as caught:
                call("defect")
            seen = f"{caught.value.details()} {caught.value.trailing_metadata()}"
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert "internal error" in seen
            assert "secret" not in seen
            assert "Traceback" not in seen
    assert caplog.text.count("ValueError: /etc/secret is broken") == 2


class Foreign(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: bytes | None = None) -> None:
        self.code = lambda: code
        self.details = lambda: "text"
        self.trailing_metadata = lambda: None if details is None else (("grpc-status-details-bin", details),)


@pytest.mark.parametrize("details", [None, b"", b"\xff\xff not a status"])
def test_statuses_that_are_not_ours(details: bytes | None) -> None:
    expected = {
        "INVALID_ARGUMENT": errors.BadRequest,
        "UNAUTHENTICATED": errors.Unauthenticated,
        "NOT_FOUND": errors.NotFound,
        "FAILED_PRECONDITION": errors.Mismatch,
        "RESOURCE_EXHAUSTED": errors.Overloaded,
        "UNAVAILABLE": errors.Unavailable,
        "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
        "CANCELLED": errors.Cancelled,
    }
    for code in grpc.StatusCode:
        assert type(rpc.error_of(Foreign(code, details))) is expected.get(code.name, errors.ForefetchError)


def test_nobody_there_is_unavailable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with contextlib.closing(Stub(address)) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.ids("hello")
    assert type(rpc.error_of(caught.value)) is errors.Unavailable


# Deadlines, cancellation, retries, limits


def test_deadline_is_told_to_the_handler(server: Running) -> None:
    with server.stub() as stub:
        assert stub.ids("left")[0] in (9, 10)
        assert list(stub.router.Tokenize(pb.TokenizeRequest(text="left")).ids) == [100]


def test_a_deadline_ends_the_handler(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with server.stub() as stub, pytest.raises(grpc.RpcError) as caught:
        list(stub.router.Generate(pb.GenerateRequest(text="sleep 1"), timeout=0.3))
    assert type(rpc.error_of(caught.value)) is errors.DeadlineExceeded
    assert server.calls.ended.wait(5)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_cancelled_stays_cancelled(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with server.stub() as stub:
        stream = stub.router.Generate(pb.GenerateRequest(text="sleep 1"))
        next(stream)
        stream.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
    assert type(rpc.error_of(caught.value)) is errors.Cancelled
    assert server.calls.ended.wait(5)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_only_idempotent_unary_calls_are_retried(server: Running) -> None:
    with server.stub() as stub:
        assert stub.ids("flaky") == [0] * 5
        assert server.calls.count == 3
        server.calls.count = 0
        with pytest.raises(grpc.RpcError):
            stub.tokens("flaky")
        assert server.calls.count == 1


def test_large_messages_and_metadata(server: Running) -> None:
    with server.stub() as stub:
        assert len(stub.ids("x" * (5 << 20))) == 5 << 20
        assert stub.ids("metadata", metadata=(("x-big", "y" * 40_000),)) == [40_000]


def test_a_silent_stream_survives_many_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the widely copied option name (the control) the same stream dies. gRPC pings once a second at most."""
    monkeypatch.setattr(channels, "KEEPALIVE_MS", 100)
    right = [*channels.server_options(), ("grpc.http2.max_ping_strikes", 1)]
    wrong = [(key.replace("min_ping", "min_recv_ping"), value) for key, value in right]

    def outcome(stub: Stub) -> str:
        try:
            return str(stub.tokens("sleep 2.7"))
        except grpc.RpcError as error:
            return str(error)

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        stubs = []
        for options in (right, wrong):
            monkeypatch.setattr(servers, "server_options", lambda options=options: options)
            running = [stack.enter_context(serving(kind)) for kind in ("sync", "aio")]
            stubs += [stack.enter_context(server.stub()) for server in running]
        outcomes = list(pool.map(outcome, stubs))
    assert outcomes[:2] == ["2", "2"]
    assert all("Too many pings" in outcome for outcome in outcomes[2:])


# Health, reflection, metrics, binding


def test_health_of_every_name(server: Running) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE, "liveness", "readiness"):
            assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            health.Check(health_pb2.HealthCheckRequest(service="other"))


def test_reflection_is_behind_its_flag(kind: str) -> None:
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with serving(kind, ServiceConfig(reflection=True)) as server, grpc.insecure_channel(server.address) as channel:
        assert SERVICE in ProtoReflectionDescriptorDatabase(channel).get_services()
    with serving(kind) as server, grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
            ProtoReflectionDescriptorDatabase(channel).get_services()


def test_metrics_over_http(kind: str) -> None:
    from prometheus_client import CollectorRegistry, Counter

    registry = CollectorRegistry()
    Counter("forefetch_things", "Things.", registry=registry).inc()
    with serving(kind, ServiceConfig(metrics_listen="127.0.0.1:0"), registry) as server:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=5) as page:
            assert b"forefetch_things_total 1.0" in page.read()
        with (
            pytest.raises(ConfigError, match="--metrics-listen"),
            serving(kind, ServiceConfig(metrics_listen=server.metrics), registry),
        ):
            pass


def test_a_taken_port_is_refused(server: Running, kind: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"--listen: cannot serve on 127\.0\.0\.1"),
        serving(kind, ServiceConfig(listen=server.address)),
    ):
        pass


# TLS


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and NAME.pem + NAME.key for "server", "renewed" and "client"; "stranger" has another authority."""
    import trustme

    folder = tmp_path_factory.mktemp("pki")
    ca, other = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    for name in ("server", "renewed", "client", "stranger"):
        issued = (other if name == "stranger" else ca).issue_cert("127.0.0.1", common_name=name)
        (folder / f"{name}.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    return folder


def tls_config(folder: Path, name: str = "server") -> ServiceConfig:
    return ServiceConfig(
        tls_cert=str(folder / f"{name}.pem"), tls_key=str(folder / f"{name}.key"), tls_ca=str(folder / "ca.pem")
    )


def test_mutual_tls(kind: str, pki: Path) -> None:
    mutual = rpc.tls_of(tls_config(pki, "client"))
    with serving(kind, tls_config(pki)) as server:
        with server.stub(mutual) as stub:
            assert stub.ids("hello") == [0] * 5
        for refused in (None, rpc.Tls(ca=str(pki / "ca.pem")), rpc.tls_of(tls_config(pki, "stranger")), replace(mutual, ca="")):
            with server.stub(refused) as stub, pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                stub.ids("hello")


def test_server_tls_alone(kind: str, pki: Path) -> None:
    with serving(kind, replace(tls_config(pki), tls_ca="")) as server, server.stub(rpc.Tls(ca=str(pki / "ca.pem"))) as stub:
        assert stub.ids("hi") == [0] * 2


def test_certificates_rotate_without_a_restart(pki: Path, tmp_path: Path) -> None:
    import ssl

    def install(name: str) -> None:
        for end in ("pem", "key"):
            (tmp_path / f"server.{end}").write_bytes((pki / f"{name}.{end}").read_bytes())

    def presented(address: str) -> str:
        host, _, port = address.rpartition(":")
        return ssl.get_server_certificate((host, int(port)), timeout=5)

    install("server")
    config = replace(tls_config(tmp_path), tls_ca="")
    with serving("sync", config) as server:
        before = presented(server.address)
        (tmp_path / "server.pem").write_bytes(b"half a")
        assert presented(server.address) == before
        install("renewed")
        assert presented(server.address) != before
        with server.stub(rpc.Tls(ca=str(pki / "ca.pem"))) as stub:
            assert stub.ids("hi") == [0] * 2


def test_unreadable_pem_files_name_their_flag(kind: str, pki: Path, tmp_path: Path) -> None:
    for field in ("tls_cert", "tls_key", "tls_ca"):
        config = replace(tls_config(pki), **{field: str(tmp_path / "none")})
        with (
            pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}: cannot read the file: No such file"),
            serving(kind, config),
        ):
            pass
    assert rpc.tls_of(ServiceConfig()) is None


# Signals, with real processes


@contextlib.contextmanager
def process(kind: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    child = subprocess.Popen(
        [sys.executable, "-W", "error", rpc_calls.__file__, kind, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout
        yield child, json.loads(child.stdout.readline() or "{}")
    finally:
        child.kill()
        child.communicate()


@contextlib.contextmanager
def call_in_flight(address: str, text: str) -> Iterator[Any]:
    """A future of what a Generate call ends in, once its first token is here."""
    with contextlib.closing(Stub(address)) as stub, ThreadPoolExecutor(1) as pool:
        stream = stub.router.Generate(pb.GenerateRequest(text=text), timeout=20)
        next(stream)
        yield pool.submit(lambda: [str(message.WhichOneof("event")) for message in stream])
        stream.cancel()


@pytest.mark.parametrize(("kind", "number"), [("sync", signal.SIGTERM), ("aio", signal.SIGINT)])
def test_a_signal_drains(kind: str, number: signal.Signals) -> None:
    with process(kind, "--drain-s=10") as (child, ready):
        with call_in_flight(ready["address"], "sleep 0.6") as running:
            child.send_signal(number)
            time.sleep(0.3)
            with contextlib.closing(Stub(ready["address"])) as late, pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                late.ids("hello")
            assert running.result(5) == ["finish"]
        assert child.wait(5) == 0
        assert child.communicate()[1] == ""


def test_what_outlasts_the_drain_ends_as_unavailable(kind: str) -> None:
    with process(kind, "--drain-s=0.2") as (child, ready), call_in_flight(ready["address"], "sleep 1") as running:
        child.terminate()
        with pytest.raises(grpc.RpcError) as caught:
            running.result(5)
        assert isinstance(rpc.error_of(caught.value), errors.Unavailable)
        assert child.wait(9) in (0, 1)


def test_a_second_signal_ends_the_drain(kind: str) -> None:
    with process(kind, "--drain-s=60") as (child, ready), call_in_flight(ready["address"], "sleep 1"):
        child.terminate()
        time.sleep(0.2)
        child.terminate()
        assert child.wait(4) == 0


def test_a_stuck_thread_does_not_keep_the_process() -> None:
    with process("sync-impatient", "--drain-s=0") as (child, ready), call_in_flight(ready["address"], "sleep 60"):
        child.terminate()
        assert child.wait(15) == 1
        assert "did not end in time" in child.communicate()[1]


def test_health_watchers_do_not_hold_a_drain(kind: str) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with process(kind, "--drain-s=60") as (child, ready), grpc.insecure_channel(ready["address"]) as channel:
        states = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)
        assert next(states).status == health_pb2.HealthCheckResponse.SERVING
        child.terminate()
        assert next(states).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert child.wait(5) == 0


def test_a_signal_that_lands_on_another_thread_is_seen(kind: str) -> None:
    """The kernel picks any thread that does not block the signal, one of gRPC's for instance."""
    with process(f"{kind}-masked") as (child, _):
        child.terminate()
        assert child.wait(5) == 0


def test_a_wrong_setting_exits_with_2() -> None:
    with serving("aio") as server, process("aio", f"--listen={server.address}") as (child, ready):
        assert ready == {}
        assert child.wait(5) == 2
        assert child.communicate()[1].strip().splitlines()[-1].startswith("test: error: --listen: cannot serve on 127.0.0.1")


def test_logs_are_one_line_per_record(capsys: pytest.CaptureFixture[str]) -> None:
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        rpc.setup_logging("info")
        try:
            raise ValueError("a\nb")
        except ValueError:
            logging.exception("oh\nno")
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    assert "oh | no" in line
    assert "ValueError: a | b" in line
