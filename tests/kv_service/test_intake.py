"""Put streams that do not end well, and requests that are malformed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import grpc
import pytest
import xxhash

from forefetch import rpc
from forefetch.errors import BadRequest, Overloaded
from forefetch.v1 import kv_pb2 as pb
from kv_service import server
from kv_service.client import Key, chain
from kv_service.config import KvConfig

if TYPE_CHECKING:
    from kv_calls import Kv

from kv_wire import MIB, put_of, refusal, whole, wire
from waiting import until

# Transfers that do not end well


def test_a_wrong_checksum_is_refused_and_leaves_nothing(kv: Kv) -> None:
    first, second = kv.keys(1), kv.keys(2)
    reply = kv.stub.Put(iter([whole(first[0], b"data", checksum=bytes(16)), whole(second[0], b"data")]))
    assert (reply.stored, reply.refused) == (1, 1)
    assert kv.client.look_up(first) == 0
    assert kv.client.look_up(second) == 1


@pytest.mark.parametrize("last", [True, False])
def test_a_short_block_is_refused_and_leaves_nothing(kv: Kv, last: bool) -> None:
    (key,) = kv.keys(1)
    reply = kv.stub.Put(iter([whole(key, b"data", size=5, last=last, checksum=bytes(16) if last else b"")]))
    assert (reply.stored, reply.refused) == (0, 1)
    assert kv.client.look_up([key]) == 0
    assert kv.servicer.vault.store.room.memory == 0


def test_a_block_in_small_parts_is_kept_in_one_piece(kv: Kv) -> None:
    (key,) = kv.keys(1)
    data = bytes(range(200))
    head = pb.BlockPart(key=wire(key), size=200, data=data[:1])
    last = pb.BlockPart(data=data[199:], last=True, checksum=xxhash.xxh3_128_digest(data))
    middle = [pb.BlockPart(data=data[at : at + 1]) for at in range(1, 199)]
    assert kv.stub.Put(iter([pb.PutRequest(parts=[head, *middle, last])])).stored == 1
    assert [len(pieces) for pieces in kv.servicer.vault._bytes.values()] == [1]
    assert kv.client.get([key]) == [data]


def test_an_aborted_transfer_leaves_what_was_whole_and_nothing_else(kv: Kv, caplog: pytest.LogCaptureFixture) -> None:
    done, cut = kv.keys(1, 2)
    over = threading.Event()

    def chunks() -> Iterator[pb.PutRequest]:
        yield whole(done, b"data")
        yield put_of(key=wire(cut), size=2 * MIB, data=bytes(MIB))
        over.wait(60)

    call = kv.stub.Put.future(chunks())
    until(lambda: kv.servicer.vault.store.room.memory >= 2 * MIB)
    call.cancel()
    over.set()
    until(lambda: not kv.servicer.busy and kv.servicer.vault.store.room.memory == 4)
    assert kv.client.look_up([done, cut]) == 1
    assert kv.client.stats().refused == 1
    assert caplog.text == ""


def test_a_reader_that_goes_away_frees_its_place(kv: Kv, caplog: pytest.LogCaptureFixture) -> None:
    keys = kv.keys(1, 2, 3, 4)
    kv.put(keys, 2 * MIB)
    stream = kv.stub.Get(pb.GetRequest(keys=16 * [wire(key) for key in keys]))  # more than transports hold for a reader
    next(stream)
    assert kv.servicer.busy
    stream.cancel()
    until(lambda: not kv.servicer.busy)
    assert caplog.text == ""


class Stalled:
    """A Put that has sent half a block and sends no more."""

    def __init__(self, kv: Kv, key: Key) -> None:
        self.release = threading.Event()
        self.call = kv.stub.Put.future(self._chunks(key), timeout=60)

    def _chunks(self, key: Key) -> Iterator[pb.PutRequest]:
        yield put_of(key=wire(key), size=2, data=b"1")
        self.release.wait(60)
        yield put_of(data=b"2", last=True, checksum=xxhash.xxh3_128_digest(b"12"))


def test_stalled_transfers_leave_room_for_calls_and_are_bounded(kv: Kv) -> None:
    stalled = [Stalled(kv, kv.keys(token)[0]) for token in range(server.TRANSFERS)]
    until(lambda: kv.servicer._transfers == server.TRANSFERS)
    assert kv.client.describe(timeout_s=60).instance_id
    assert kv.client.look_up(kv.keys(1), timeout_s=60) == 0
    with pytest.raises(Overloaded) as caught:
        kv.put(kv.keys(99))
    assert caught.value.retry_after_s == pytest.approx(0.1)
    for one in stalled:
        one.release.set()
    assert all(one.call.result().stored == 1 for one in stalled)
    assert kv.put(kv.keys(99)) == (1, 0)


def test_a_transfer_that_takes_too_long_is_cancelled(kv: Kv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TRANSFER_LIMIT_S", 0.3)
    stalled = Stalled(kv, kv.keys(1)[0])
    assert stalled.call.code() is grpc.StatusCode.CANCELLED
    stalled.release.set()
    until(lambda: not kv.servicer.busy)
    assert kv.servicer.vault.store.room.memory == 0
    assert (kv.client.stats().slow_peers, kv.client.stats().broken) == (1, 1)
    assert kv.client.look_up(kv.keys(1)) == 0


def test_a_reader_that_takes_too_long_is_cut_off_and_its_blocks_may_go(
    start_kv: Callable[[KvConfig], Kv], monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = start_kv(KvConfig(budget_mb=24, max_block_mb=2))
    monkeypatch.setattr(server, "TRANSFER_LIMIT_S", 0.3)
    keys = kv.keys(*range(11))
    assert kv.put(keys, 2 * MIB) == (11, 0)
    stream = kv.stub.Get(pb.GetRequest(keys=map(wire, keys)))
    next(stream)  # and reads no more: flow control keeps the rest at the service
    until(lambda: kv.client.stats().slow_peers == 1 and not kv.servicer.busy)
    with pytest.raises(grpc.RpcError, match="CANCELLED"):
        list(stream)
    assert not any(entry.leases for entry in kv.servicer.vault.entries())
    assert kv.put(kv.keys(100), 2 * MIB) == (1, 0)
    assert kv.client.stats().evicted == 2  # down to the low watermark
    assert kv.client.get(keys) == [kv.block(key, 2 * MIB) for key in keys[:9]]


# Malformed requests

KEY = chain(bytes(32), [[1, 2]])[0]
CHILD = Key(bytes(32), bytes(range(32)), (1,))
CUT = put_of(key=wire(KEY), size=2, data=b"1")
CUT_LARGE = put_of(key=wire(KEY), size=2000, data=b"1")
MALFORMED: dict[str, tuple[list[pb.PutRequest], str, str]] = {
    "no key": ([put_of(size=1, data=b"1")], "parts.key", "first part"),
    "key twice": ([CUT, CUT], "parts.key", "first part only"),
    "size twice": ([CUT, put_of(size=2, data=b"1")], "parts.key", "first part only"),
    "size 0": ([whole(KEY, b"")], "parts.size", "must be 1 to 2097152 bytes, is 0"),
    "too large": ([whole(KEY, b"1", size=2 * MIB + 1)], "parts.size", "must be 1 to 2097152 bytes, is 2097153"),
    "huge": ([whole(KEY, b"1", size=2**64 - 1)], "parts.size", "is 18446744073709551615"),
    "too much": ([whole(KEY, b"123", size=2)], "parts.data", "more than the block's size of 2 bytes"),
    "empty part": ([CUT, put_of()], "parts.data", "must not be empty"),
    "large chunk": ([whole(KEY, bytes(4 * MIB + 1), size=MIB)], "parts.data", "must be at most 4194304 bytes in a part"),
    "many parts": ([CUT_LARGE, *[put_of(data=b"1")] * 1024], "parts.data", "more than 1024 parts of a block of 2000 bytes"),
    "no checksum": ([whole(KEY, b"1", checksum=b"")], "parts.checksum", "must be 16 bytes"),
    "early checksum": ([whole(KEY, b"1", last=False)], "parts.checksum", "empty in the others"),
    "short digest": ([whole(KEY._replace(digest=b"1"), b"1")], "parts.key.digest", "must be 32 bytes, is 1"),
    "short parent": ([whole(KEY._replace(parent=b"1"), b"1")], "parts.key.parent", "must be 32 bytes, is 1"),
    "no tokens": ([whole(KEY._replace(token_ids=()), b"1")], "parts.key.token_ids", "must be 1 to 4096 ids, are 0"),
    "many tokens": ([whole(KEY._replace(token_ids=(1,) * 4097), b"1")], "parts.key.token_ids", "are 4097"),
    "wrong digest": ([whole(CHILD, b"1")], "parts.key.digest", "not the digest of its parent and token_ids"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_puts_name_field_and_limit(kv: Kv, name: str) -> None:
    chunks, field, text = MALFORMED[name]
    error = refusal(lambda: kv.stub.Put(iter(chunks)))
    assert isinstance(error, BadRequest)
    assert error.field == field
    assert text in str(error)
    assert kv.put(kv.keys(1)) == (1, 0)
    assert (kv.servicer.vault.store.room.memory, kv.servicer.vault.store.blocks) == (100, 1)


def test_malformed_chains_name_field_and_limit(kv: Kv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_KEYS", 3)
    one, other = kv.keys(1, 2), kv.keys(3, 4)
    chains = [
        (kv.client.look_up, "digests: must be at most 3, are 4", [*one, *other]),
        (kv.client.look_up, "digests: must be 32 bytes each, are 35 in all", [one[0], one[1]._replace(digest=b"bad")]),
        (kv.client.get, "keys: must be at most 3, are 4", [*one, *other]),
        (kv.client.get, "keys[1].digest: must be 32 bytes, is 3", [one[0], one[1]._replace(digest=b"bad")]),
        (kv.client.get, "keys[1].parent: must be 32 bytes, is 3", [one[0], one[1]._replace(parent=b"bad")]),
        (kv.client.get, "keys[0].token_ids: must be 1 to 4096 ids, are 0", [one[0]._replace(token_ids=())]),
    ]
    for call, text, keys in chains:
        with pytest.raises(BadRequest) as caught:
            call(keys)
        assert str(caught.value) == text
    assert kv.client.look_up([]) == 0
    assert kv.client.get([]) == []


def test_bytes_that_are_no_message_at_all(kv: Kv) -> None:
    with rpc.channel(kv.address) as channel:
        for method in ("LookUp", "Describe", "Nonsense"):
            call = channel.unary_unary(f"/{server.SERVICE}/{method}")
            with pytest.raises(grpc.RpcError):
                call(b"\xff" * 100, timeout=60)
    assert kv.put(kv.keys(1)) == (1, 0)
