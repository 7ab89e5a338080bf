"""Prefixes from a KV service that lies, is slow or away: each a miss with its reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import xxhash
from kv_rigs import PAGE, Rig, page_of, tokens
from waiting import PATIENCE_S

from forefetch import rpc
from forefetch.errors import Unavailable
from forefetch.v1 import kv_pb2 as pb
from forefetch.v1 import kv_pb2_grpc as pb_grpc
from router_service.cost import PROBE


class Bad(pb_grpc.KvServiceServicer):
    """Says that it holds everything, then does as `how` says."""

    def __init__(self) -> None:
        self.how = ""
        self.release = threading.Event()
        self.gets = self.look_ups = 0
        self.on_disk = False

    @rpc.sync_handler
    def Describe(self, request: Any, context: Any) -> pb.KvServiceDescribeResponse:
        return pb.KvServiceDescribeResponse(instance_id="one")

    @rpc.sync_handler
    def LookUp(self, request: Any, context: Any) -> pb.LookUpResponse:
        self.look_ups += 1
        if self.how == "no look-up":
            raise Unavailable("not now")
        held = len(request.digests) // 32
        return pb.LookUpResponse(held=held, on_disk=held * self.on_disk)

    @rpc.sync_handler
    def Put(self, request: Any, context: Any) -> pb.PutResponse:
        return pb.PutResponse(stored=sum(part.last for message in request for part in message.parts))

    @rpc.sync_handler
    def Get(self, request: Any, context: Any) -> Iterator[pb.GetResponse]:
        self.gets += 1
        for index, _ in enumerate(request.keys):
            data = page_of(tuple(tokens((index + 1) * PAGE)))
            checksum = xxhash.xxh3_128_digest(data)
            if self.how == "crawls":
                time.sleep(0.02)
            if index == 2:
                if self.how == "slow":
                    self.release.wait(60)
                if self.how == "ends":
                    return
                if self.how == "breaks":
                    raise Unavailable("gone")
                if self.how == "flips":
                    data = bytes([data[0] ^ 1]) + data[1:]
                if self.how == "short":
                    data = data[:-1]
                if self.how == "another size":
                    data, checksum = data[:-1], xxhash.xxh3_128_digest(data[:-1])
                if self.how == "half":
                    yield pb.GetResponse(parts=[pb.BlockPart(index=index, data=data[:10])])
                    return
            yield pb.GetResponse(parts=[pb.BlockPart(index=index, data=data, last=True, checksum=checksum)])


@pytest.fixture
def bad() -> Iterator[tuple[Bad, str]]:
    servicer, server = Bad(), grpc.server(ThreadPoolExecutor(8))
    pb_grpc.add_KvServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    servicer.release.set()
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("how", "blocks", "reason"),
    [
        ("", 5, ""),
        ("no look-up", 0, "unavailable"),
        ("slow", 0, "late"),
        ("ends", 2, "broken"),
        ("breaks", 2, "broken"),
        ("flips", 2, "broken"),
        ("short", 2, "broken"),
        ("half", 2, "broken"),
        ("another size", 2, "mismatch"),
    ],
)
def test_what_goes_wrong_is_a_miss(how: str, blocks: int, reason: str, bad: tuple[Bad, str], make: Callable[..., Rig]) -> None:
    servicer, address = bad
    servicer.how = how
    rig = make([address], timeout_s=0.5 if how == "slow" else PATIENCE_S)
    request = rig.admit(tokens(21))
    assert rig.loaded(request) == (blocks if how != "slow" else request.cached // PAGE) * PAGE
    assert request.cached < 21
    assert dict(rig.kv.status().prefix_misses) == ({reason: 1} if reason else {})


def test_a_service_that_is_away_is_not_waited_for(make: Callable[..., Rig], bad: tuple[Bad, str]) -> None:
    rig = make(["127.0.0.1:9"], away=("127.0.0.1:9",))
    started = time.monotonic()
    assert rig.loaded(rig.admit(tokens(21))) == 0
    assert time.monotonic() - started < rig.timeout_s / 2
    assert dict(rig.kv.status().prefix_misses) == {"unavailable": 1}


def test_where_computing_is_faster_nothing_is_asked(make: Callable[..., Rig], bad: tuple[Bad, str]) -> None:
    servicer, address = bad
    rig = make([address])
    assert rig.kv.prefix is not None
    rig.kv.prefix.cost.prefill.add(1e9, 1.0)
    rig.kv.prefix.cost.load.add(1.0, 1.0)
    request = rig.admit(tokens(21))
    assert not request.loading
    assert (servicer.look_ups, rig.kv.status().prefix_skipped) == (0, 1)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_that_loading_is_slower_than_computing_is_found_out_by_measuring(
    where: str, make: Callable[..., Rig], bad: tuple[Bad, str]
) -> None:
    """What is on disk is known only when the service was asked, and counts on its own."""
    servicer, address = bad
    servicer.how, servicer.on_disk = "crawls", where == "disk"
    rig = make([address])

    def ask() -> int:
        """How many blocks of a prompt came; the rest is computed, in a millisecond."""
        request = rig.admit(tokens(21))
        loaded = rig.loaded(request) // PAGE
        plan = rig.scheduler.plan()
        assert plan is not None
        rig.compute(request)
        rig.kv.computed(plan, 1_000_000)
        rig.end(request)
        return loaded

    assert ask() == 5, "what is not known is tried"
    assert [ask() for _ in range(PROBE)] == [0] * (PROBE - 1) + [5], "but for a probe"
    status = rig.kv.status()
    refused = (status.prefix_skipped, status.prefix_misses["slow"])
    assert refused == ((0, PROBE - 1) if where == "disk" else (PROBE - 1, 0))
    assert servicer.gets == 2
