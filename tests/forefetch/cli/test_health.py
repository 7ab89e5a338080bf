"""`forefetch health` against a health service that is really served, plain and over mutual TLS."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from forefetch.cli import health as command
from forefetch.errors import ConfigError, Unavailable

Status = health_pb2.HealthCheckResponse


class Served:
    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.server, self.states = grpc.server(futures.ThreadPoolExecutor(2)), health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.states, self.server)
        at = "127.0.0.1:0"
        port = self.server.add_secure_port(at, credentials) if credentials else self.server.add_insecure_port(at)
        self.address = f"127.0.0.1:{port}"
        self.say(startup=True, liveness=True, readiness=True)
        self.server.start()

    def say(self, **states: bool) -> None:
        for name, serving in states.items():
            self.states.set(name, Status.SERVING if serving else Status.NOT_SERVING)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.server.stop(None).wait(5)


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return command.run(parser.parse_args(["health", *argv]))


def test_a_ready_service(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--address", served.address) == 0
    assert capsys.readouterr().out.splitlines() == ["startup    serving", "liveness   serving", "readiness  serving"]


def test_one_that_is_not_ready_is_status_1(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.say(readiness=False)
    assert run("--address", served.address) == 1
    assert "readiness  not serving" in capsys.readouterr().out


def test_waiting_ends_when_it_becomes_ready(served: Served) -> None:
    served.say(readiness=False)
    threading.Timer(0.3, served.say, kwargs={"readiness": True}).start()
    assert run("--address", served.address, "--wait", "60") == 0


def test_nobody_there() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 does not answer"):
        run("--address", "127.0.0.1:1")


def test_over_mutual_tls(tmp_path: Path) -> None:
    import trustme

    ca = trustme.CA()
    mine, theirs = ca.issue_cert("127.0.0.1"), ca.issue_cert("client")
    (tmp_path / "ca").write_bytes(ca.cert_pem.bytes())
    (tmp_path / "cert").write_bytes(theirs.cert_chain_pems[0].bytes())
    (tmp_path / "key").write_bytes(theirs.private_key_pem.bytes())
    pair = (mine.private_key_pem.bytes(), mine.cert_chain_pems[0].bytes())
    served = Served(grpc.ssl_server_credentials([pair], ca.cert_pem.bytes(), require_client_auth=True))
    to = ("--address", served.address, f"--tls-ca={tmp_path}/ca")
    try:
        assert run(*to, f"--tls-cert={tmp_path}/cert", f"--tls-key={tmp_path}/key") == 0
        with pytest.raises(Unavailable):
            run(*to)
        with pytest.raises(ConfigError, match="set both"):
            run(*to, f"--tls-cert={tmp_path}/cert")
    finally:
        served.server.stop(None).wait(5)
