"""`forefetch kv` against a service with a disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_calls import Kv, running
from waiting import until

from forefetch import cli
from forefetch.v1 import kv_pb2 as pb
from forefetch.v1 import router_pb2_grpc
from kv_service import operators, server
from kv_service.client import Geometry, KvClient, Origin
from kv_service.config import KvConfig


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kv]:
    with running(KvConfig(dir=str(tmp_path), budget_mb=8, max_block_mb=2, disk_gb=0.1)) as kv:
        origin = Origin("ab" * 32, Geometry(2, 2, 8), "default theta=1e6", "e2m0", "outliers=1", 2)
        client = KvClient(kv.address, origin=origin)
        client.put([(key, kv.block(key, 5000)) for key in kv.keys(1, 2, 3)])
        client.put([(key, kv.block(key, 5000)) for key in kv.keys(9)])
        client.look_up(kv.keys(1, 7))
        client.close()
        yield kv


def forefetch(*argv: str) -> int:
    return cli.main(["kv", *argv])


def test_stats(kept: Kv, capsys: pytest.CaptureFixture[str]) -> None:
    kept.client.put([(kept.keys(1)[0], b"other")])
    assert forefetch("stats", "--address", kept.address) == 0
    out = capsys.readouterr().out
    held, asked, put = "4 held, 19.5 KiB of 102.4 MiB", "2 blocks asked for, 50.0 % held", "4 stored, 0 held already, 1 refused"
    for text in (held, asked, put, "conflicts"):
        assert text in out, out
    assert "corrupt" not in out
    assert forefetch("stats", "--address", kept.address, "--json") == 0
    assert json.loads(capsys.readouterr().out)["blocks"] == 4


def test_inspect_shows_chains(kept: Kv, capsys: pytest.CaptureFixture[str]) -> None:
    assert forefetch("inspect", "--address", kept.address, "--json") == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["tenant"], one["key"]["position"], one["children"]) for one in shown] == [
        ("default", 0, 1),
        ("default", 2, 1),
        ("default", 4, 0),
        ("default", 0, 0),
    ]
    keys = kept.keys(1, 2, 3)
    assert [one["key"]["digest"] for one in shown[:3]] == [key.digest.hex() for key in keys]
    assert shown[0]["key"]["token_ids"] == [1, 2]
    assert forefetch("inspect", "--address", kept.address, "--digest", keys[1].digest.hex()[:10].upper()) == 0
    out = capsys.readouterr().out
    assert "e2m0 outliers=1" in out
    assert [key.digest.hex()[:8] in out for key in (*keys, kept.keys(9)[0])] == [True, True, True, False]
    assert forefetch("inspect", "--address", kept.address, "--limit", "1", "--json") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_verify_reads_every_block_and_drops_what_is_damaged(kept: Kv, capsys: pytest.CaptureFixture[str]) -> None:
    assert forefetch("verify", "--address", kept.address) == 0
    assert "4 blocks, 19.5 KiB: none damaged" in capsys.readouterr().out
    vault, keys = kept.servicer.vault, kept.keys(1, 2, 3)
    name = vault.labels.tag("default") + keys[1].digest
    vault._bytes[name] = [bytes(5000)]
    assert forefetch("verify", "--address", kept.address) == 1
    out = capsys.readouterr().out
    assert f"damaged {keys[1].digest.hex()}" in out
    assert "4 blocks, 19.5 KiB: 1 damaged" in out
    assert kept.client.look_up(keys) == 1
    assert forefetch("verify", "--address", kept.address, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["blocks"] == 3
    assert kept.client.stats().corrupt == 1


def test_one_inspection_at_a_time(kept: Kv, capsys: pytest.CaptureFixture[str]) -> None:
    with kept.servicer._operator:
        assert forefetch("verify", "--address", kept.address) == 1
        assert "another inspection is running" in capsys.readouterr().err
    assert forefetch("verify", "--address", kept.address) == 0


def test_a_reader_that_stopped_does_not_keep_others_from_inspecting(kept: Kv, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = pb.InspectResponse(tenant="x" * 1_000_000)
    with monkeypatch.context() as changed:
        changed.setattr(server, "TRANSFER_LIMIT_S", 0.3)
        changed.setattr(operators, "inspect", lambda *_: iter([shown] * 30))
        stopped = kept.stub.Inspect(pb.InspectRequest())
        next(stopped)  # and reads no more: flow control keeps the rest at the service
        until(lambda: kept.client.stats().slow_peers == 1 and not kept.servicer._operator.locked(), 60.0)
    assert [message.damaged for message in kept.stub.Verify(pb.VerifyRequest())] == [0]


def test_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokens").write_text("acme: acme-token-0123456789\n")
    (tmp_path / "token").write_text("acme-token-0123456789\n")
    with running(KvConfig(budget_mb=8, max_block_mb=2, auth_tokens=str(tmp_path / "tokens"))) as kv:
        assert forefetch("stats", "--address", kv.address) == 1
        assert "send one `authorization: Bearer TOKEN`" in capsys.readouterr().err
        assert forefetch("stats", "--address", kv.address, "--token-file", str(tmp_path / "token")) == 0


def test_a_router_is_no_kv_service(capsys: pytest.CaptureFixture[str]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    server = grpc.server(ThreadPoolExecutor(1))
    router_pb2_grpc.add_RouterServiceServicer_to_server(router_pb2_grpc.RouterServiceServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    assert forefetch("verify", "--address", f"127.0.0.1:{port}") == 1
    assert "is no KV service" in capsys.readouterr().err
    server.stop(None).wait()
