"""Errors, deadlines, cancellation, retries, limits, health and reflection over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import pytest
from rpc_calls import ERRORS, SERVICE
from rpc_servers import DEADLINE_S, Running, Stub, serving
from waiting import kept_port

from forefetch import errors, rpc
from forefetch.errors import ConfigError
from forefetch.rpc import channels, servers
from forefetch.settings import ServiceConfig
from forefetch.v1 import router_pb2 as pb
from forefetch.v1 import router_pb2_grpc as pb_grpc


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
                await pb_grpc.RouterServiceStub(channel).Tokenize(pb.TokenizeRequest(text="busy"), timeout=60)
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
    with kept_port() as port, contextlib.closing(Stub(address := f"127.0.0.1:{port}")) as stub:
        with pytest.raises(grpc.RpcError) as caught:
            stub.ids("hello")
    error = rpc.error_of(caught.value)
    assert type(error) is errors.Unavailable
    assert str(error) == f"{address} does not answer: Connection refused"


def test_deadline_is_told_to_the_handler(server: Running) -> None:
    with server.stub() as stub:
        assert 0 < stub.ids("left")[0] <= DEADLINE_S
        assert list(stub.router.Tokenize(pb.TokenizeRequest(text="left")).ids) == [100]


def test_a_deadline_ends_the_handler(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with server.stub() as stub, pytest.raises(grpc.RpcError) as caught:
        list(stub.router.Generate(pb.GenerateRequest(text="sleep 60"), timeout=1.0))
    assert type(rpc.error_of(caught.value)) is errors.DeadlineExceeded
    assert server.calls.ended.wait(60)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_cancelled_stays_cancelled(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with server.stub() as stub:
        stream = stub.router.Generate(pb.GenerateRequest(text="sleep 60"))
        next(stream)
        stream.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
    assert type(rpc.error_of(caught.value)) is errors.Cancelled
    assert server.calls.ended.wait(60)
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

    def outcome(stub: Stub, seconds: float) -> str:
        try:
            return str(stub.tokens(f"sleep {seconds}"))
        except grpc.RpcError as error:
            return str(error)

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        stubs = []
        for options in (right, wrong):
            monkeypatch.setattr(servers, "server_options", lambda *_, options=options: options)
            running = [stack.enter_context(serving(kind)) for kind in ("sync", "aio")]
            stubs += [stack.enter_context(server.stub()) for server in running]
        outcomes = list(pool.map(outcome, stubs, (2.7, 2.7, 50.0, 50.0)))
    assert outcomes[:2] == ["2", "2"]
    assert all("Too many pings" in outcome for outcome in outcomes[2:])


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
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as page:
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
