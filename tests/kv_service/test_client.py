"""The client against services that misbehave: what is not whole and right is a miss, never a hit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import xxhash
from waiting import until

from forefetch import rpc
from forefetch.errors import BadRequest, Cancelled, DeadlineExceeded, Overloaded, Unavailable
from forefetch.v1 import kv_pb2 as pb
from forefetch.v1 import kv_pb2_grpc as pb_grpc
from kv_service.client import Key, KvClient

if TYPE_CHECKING:
    from kv_calls import Kv

KEYS = [Key(bytes(32), b"", (1,))] * 3


def part(index: int, data: bytes, *, last: bool = True, checksum: bytes | None = None) -> pb.BlockPart:
    checksum = xxhash.xxh3_128_digest(data) if checksum is None else checksum
    return pb.BlockPart(index=index, data=data, last=last, checksum=checksum if last else b"")


def chunk(*args: Any, **how: Any) -> pb.GetResponse:
    return pb.GetResponse(parts=[part(*args, **how)])


class Liar(pb_grpc.KvServiceServicer):
    """Answers Get with `chunks`: a pause lasts until nobody waits any more, an exception is raised. Describe is a pause."""

    chunks: list[Any]

    @rpc.sync_handler
    def Get(self, request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[pb.GetResponse]:
        for one in self.chunks:
            if isinstance(one, Exception):
                raise one
            if one is PAUSE:
                forsaken(context)
            else:
                yield one

    def Describe(self, request: pb.KvServiceDescribeRequest, context: grpc.ServicerContext) -> pb.KvServiceDescribeResponse:
        forsaken(context)
        return pb.KvServiceDescribeResponse()


PAUSE = object()


def forsaken(context: grpc.ServicerContext) -> None:
    """Returns when the call's deadline has passed."""
    until(lambda: not context.is_active())


@pytest.fixture
def liar() -> Iterator[tuple[Liar, KvClient]]:
    service, server = Liar(), grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_KvServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client = KvClient(f"127.0.0.1:{port}")
    yield service, client
    client.close()
    server.stop(None).wait()


GOOD = chunk(0, b"first")
BROKEN: dict[str, list[Any]] = {
    "corrupt in one message": [pb.GetResponse(parts=[part(0, b"first"), part(1, b"second", checksum=bytes(16))])],
    "corrupt": [GOOD, chunk(1, b"second", checksum=bytes(16))],
    "short": [GOOD, chunk(1, b"second", last=False)],
    "another block's chunk": [GOOD, chunk(1, b"sec", last=False), chunk(2, b"ond")],
    "a block twice": [GOOD, GOOD],
    "a block left out": [GOOD, chunk(2, b"third")],
    "larger than a block may be": [GOOD, chunk(1, bytes(600), last=False), chunk(1, bytes(600))],
    "a block without end": [GOOD, *[chunk(1, bytes(500), last=False)] * 1000],
    "the service goes away": [GOOD, Unavailable("gone")],
    "the service is full": [GOOD, Overloaded("full", 1.0)],
    "a broken end": [GOOD, chunk(1, b"sec", last=False), Cancelled("cut")],
    "too slow": [GOOD, PAUSE, chunk(1, b"second")],
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_whole_and_right_is_a_miss(liar: tuple[Liar, KvClient], name: str) -> None:
    service, client = liar
    service.chunks = BROKEN[name]
    assert client.get(KEYS, timeout_s=2.0 if name == "too slow" else 60.0, most_bytes=1000) == [b"first"]
    assert client.broken_reads == 1


def test_more_blocks_than_asked_for_are_not_held(liar: tuple[Liar, KvClient]) -> None:
    service, client = liar
    service.chunks = [chunk(index, b"block") for index in range(1000)]
    assert client.get(KEYS) == [b"block"] * len(KEYS)
    assert client.broken_reads == 1


def test_a_defect_is_an_error(liar: tuple[Liar, KvClient]) -> None:
    service, client = liar
    service.chunks = [GOOD, BadRequest("keys", "no")]
    with pytest.raises(BadRequest):
        client.get(KEYS)


def test_fewer_blocks_than_asked_for_are_no_fault(liar: tuple[Liar, KvClient]) -> None:
    service, client = liar
    service.chunks = [GOOD]
    assert client.get(KEYS) == [b"first"]
    assert client.broken_reads == 0


def test_nobody_there() -> None:
    client = KvClient("127.0.0.1:1")
    calls: list[Callable[[], object]] = [
        client.describe,
        lambda: client.put([(KEYS[0], b"data")]),
        lambda: client.look_up(KEYS),
        client.stats,
    ]
    for call in calls:
        with pytest.raises(Unavailable):
            call()
    assert client.get(KEYS) == []
    assert client.broken_reads == 1
    client.close()


def test_calls_have_deadlines(liar: tuple[Liar, KvClient]) -> None:
    _, client = liar
    with pytest.raises(DeadlineExceeded):
        client.describe(timeout_s=0.1)


def test_a_closed_client_says_so(kv: Kv) -> None:
    kv.client.close()
    with pytest.raises(Cancelled):
        kv.client.describe()
    with pytest.raises(Cancelled):
        kv.client.get(KEYS)
