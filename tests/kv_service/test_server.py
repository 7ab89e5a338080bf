"""The KV service over gRPC: what it promises, what it refuses, and that it stays up."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import xxhash
from otlp_receiver import GrpcReceiver

from forefetch import rpc
from forefetch.errors import BadRequest, ConfigError, ForefetchError, Overloaded
from forefetch.process import Process
from forefetch.settings import build, child_environment
from forefetch.telemetry.context import new_root, to_metadata
from forefetch.v1 import kv_pb2 as pb
from kv_service import server
from kv_service.client import Geometry, Key, KvClient, chain, root_key
from kv_service.config import KvConfig

if TYPE_CHECKING:
    from kv_calls import Kv

MIB = 1 << 20


def wire(key: Key) -> pb.BlockKey:
    return pb.BlockKey(digest=key.digest, parent=key.parent, token_ids=key.token_ids)


def put_of(**fields: Any) -> pb.PutRequest:
    """A message of one part."""
    return pb.PutRequest(parts=[pb.BlockPart(**fields)])


def whole(key: Key, data: bytes, **changes: Any) -> pb.PutRequest:
    """A block in one part."""
    fields = {"key": wire(key), "size": len(data), "data": data, "last": True, "checksum": xxhash.xxh3_128_digest(data)}
    return put_of(**{**fields, **changes})


def refusal(call: Callable[[], Any]) -> ForefetchError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return rpc.error_of(caught.value)


# What it promises


def test_blocks_come_back(kv: Kv) -> None:
    keys = kv.keys(1, 2, 3)
    sizes = [1, MIB, MIB + 1]
    blocks = [kv.block(key, size) for key, size in zip(keys, sizes, strict=True)]
    assert kv.client.put(zip(keys, blocks, strict=True)) == (3, 0)
    assert kv.client.look_up(keys) == 3
    assert kv.client.get(keys) == blocks
    assert kv.client.get(keys[1:]) == blocks[1:]


def test_get_streams_messages_of_one_to_two_mebibytes_in_order_and_stops_at_a_hole(start_kv: Callable[[KvConfig], Kv]) -> None:
    kv = start_kv(KvConfig(budget_mb=64, max_block_mb=8))
    keys = kv.keys(*range(8))
    sizes = [3 * MIB, 700_000, 700_000, 2 * MIB, 10, 10, MIB + 1]
    kv.client.put([(key, kv.block(key, size)) for key, size in zip(keys, sizes, strict=False)])
    messages = [message.parts for message in kv.stub.Get(pb.GetRequest(keys=map(wire, keys)))]
    assert [[(part.index, len(part.data), part.last, bool(part.checksum)) for part in parts] for parts in messages] == [
        [(0, 2 * MIB, False, False)],
        [(0, MIB, True, True)],
        [(1, 700_000, True, True), (2, 700_000, True, True)],
        [(3, 2 * MIB, True, True)],
        [(4, 10, True, True), (5, 10, True, True), (6, MIB + 1, True, True)],
    ]
    assert kv.client.get(keys) == [kv.block(key, size) for key, size in zip(keys, sizes, strict=False)]


def test_puts_are_idempotent_and_conflicts_are_counted(kv: Kv) -> None:
    (key,) = kv.keys(1)
    assert [kv.put([key]), kv.put([key])] == [(1, 0), (1, 0)]
    assert kv.client.put([(key, b"other")]) == (0, 1)
    assert kv.client.get([key]) == [kv.block(key)]
    stats = kv.client.stats()
    assert (stats.blocks, stats.stored, stats.refused, stats.conflicts) == (1, 1, 1, 1)


@pytest.mark.parametrize("change", [{"token_ids": (9, 9)}, {"token_ids": (1,)}, {"parent": bytes(32)}])
def test_token_ids_and_parent_are_verified(kv: Kv, change: dict[str, Any]) -> None:
    """A digest that is held does not get a block whose tokens or prefix are others."""
    (key,) = kv.keys(1)
    kv.put([key])
    assert kv.client.get([key._replace(**change)]) == []
    assert kv.client.get([key]) == [kv.block(key)]


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": b"other"},
        {"model_digest": "model2"},
        {"geometry": Geometry(2, 2, 16)},
        {"geometry": Geometry(2, 4, 8)},
        {"geometry": Geometry(3, 2, 8)},
        {"rope": "yarn"},
        {"kv_format": "e2m0"},
        {"params": "outliers=1"},
        {"page_size": 8},
    ],
)
def test_other_settings_always_miss(kv: Kv, change: dict[str, Any]) -> None:
    """The same tokens under another model, RoPE, format, page size or tenant's salt."""
    mine: dict[str, Any] = {"tenant": b"", "model_digest": "model", "geometry": Geometry(2, 2, 8), "rope": "rope"}
    mine |= {"kv_format": "float32", "params": "", "page_size": 4}
    tokens = [[1, 2, 3, 4], [5, 6, 7, 8]]
    keys, others = (chain(root_key(**settings), tokens) for settings in (mine, mine | change))
    kv.client.put([(key, b"data") for key in keys])
    assert kv.client.look_up(keys) == 2
    assert kv.client.look_up(others) == 0
    assert kv.client.get(others) == []
    assert kv.client.get([others[0], keys[1]]) == []


def test_eviction_keeps_the_budget_and_the_prefix(kv: Kv) -> None:
    keys = kv.keys(*range(12))
    assert kv.put(keys, MIB) == (8, 4)
    assert kv.put(kv.keys(100), 2 * MIB) == (1, 0)
    assert kv.client.look_up(keys) == 5  # down to the low watermark
    stats = kv.client.stats()
    assert stats.bytes <= stats.budget_bytes == 8 * MIB
    assert (stats.evicted, stats.blocks) == (3, 6)


def test_stats_count_what_happened(kv: Kv) -> None:
    keys = kv.keys(1, 2, 3)
    kv.put(keys[:2])
    kv.client.look_up(keys)
    stats = kv.client.stats()
    assert (stats.hits, stats.misses, stats.blocks, stats.bytes) == (2, 1, 2, 200)
    assert stats.uptime_s > 0


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


def test_an_aborted_transfer_leaves_what_was_whole_and_nothing_else(kv: Kv, caplog: pytest.LogCaptureFixture) -> None:
    done, cut = kv.keys(1, 2)
    over = threading.Event()

    def chunks() -> Iterator[pb.PutRequest]:
        yield whole(done, b"data")
        yield put_of(key=wire(cut), size=2 * MIB, data=bytes(MIB))
        over.wait(10)

    call = kv.stub.Put.future(chunks())
    until(lambda: kv.servicer.vault.store.room.memory >= 2 * MIB)
    call.cancel()
    over.set()
    until(lambda: not kv.servicer.busy and kv.servicer.vault.store.room.memory == 4)
    assert kv.client.look_up([done, cut]) == 1
    assert kv.client.stats().refused == 1
    assert caplog.text == ""


def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_reader_that_goes_away_frees_its_place(kv: Kv, caplog: pytest.LogCaptureFixture) -> None:
    keys = kv.keys(1, 2, 3, 4)
    kv.put(keys, 2 * MIB)
    stream = kv.stub.Get(pb.GetRequest(keys=map(wire, keys)))
    next(stream)
    assert kv.servicer.busy
    stream.cancel()
    until(lambda: not kv.servicer.busy)
    assert caplog.text == ""


class Stalled:
    """A Put that has sent half a block and sends no more."""

    def __init__(self, kv: Kv, key: Key) -> None:
        self.release = threading.Event()
        self.call = kv.stub.Put.future(self._chunks(key), timeout=20)

    def _chunks(self, key: Key) -> Iterator[pb.PutRequest]:
        yield put_of(key=wire(key), size=2, data=b"1")
        self.release.wait(20)
        yield put_of(data=b"2", last=True, checksum=xxhash.xxh3_128_digest(b"12"))


def test_stalled_transfers_leave_room_for_calls_and_are_bounded(kv: Kv) -> None:
    stalled = [Stalled(kv, kv.keys(token)[0]) for token in range(server.TRANSFERS)]
    until(lambda: kv.servicer._transfers == server.TRANSFERS)
    assert kv.client.describe(timeout_s=2).instance_id
    assert kv.client.look_up(kv.keys(1), timeout_s=2) == 0
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


# Malformed requests

KEY = chain(bytes(32), [[1, 2]])[0]
CHILD = Key(bytes(32), bytes(range(32)), (1,))
CUT = put_of(key=wire(KEY), size=2, data=b"1")
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
        (kv.client.look_up, "digests: must be 32 bytes, is 3", [one[0], one[1]._replace(digest=b"bad")]),
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
                call(b"\xff" * 100, timeout=5)
    assert kv.put(kv.keys(1)) == (1, 0)


# The process


@pytest.fixture
def process() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(*flags: str) -> Process:
        one = Process("kv", "kv_service", flags, child_environment(PYTHONWARNINGS="error"))
        started.append(one)
        one.spawn()
        one.wait_ready(30)
        return one

    yield start
    for one in started:
        one.end(5)


def test_a_process_forgets_and_has_a_new_name_after_a_restart(kv: Kv, process: Callable[..., Process]) -> None:
    one = process("--budget-mb=4", "--max-block-mb=3")
    client = KvClient(one.address)
    keys = kv.keys(1, 2)
    before = client.describe()
    assert (before.budget_bytes, before.max_block_bytes) == (4 * MIB, 3 * MIB)
    assert client.put([(key, b"data") for key in keys]) == (2, 0)
    one.signal(signal.SIGKILL)
    one.end(5)
    one.spawn()
    one.wait_ready(30)
    assert client.describe().instance_id != before.instance_id
    assert client.look_up(keys) == 0
    client.close()
    one.signal(signal.SIGTERM)
    assert one.wait(10)
    assert one.ending() == "ended with status 0"


def test_spans_and_metrics_of_a_process(kv: Kv, process: Callable[..., Process]) -> None:
    import urllib.request

    receiver = GrpcReceiver()
    one = process(f"--otlp-endpoint={receiver.endpoint}", "--metrics-listen=127.0.0.1:0")
    client, caller = KvClient(one.address), new_root(sampled=True)
    keys = kv.keys(1)
    client.put([(keys[0], b"data")], metadata=to_metadata(caller))
    client.look_up(keys, metadata=to_metadata(caller))
    client.get(keys, metadata=to_metadata(caller))
    client.get(keys)
    client.close()
    spans = receiver.wait(lambda spans: len(spans) >= 3)
    assert {span.name for span in spans} == {"forefetch.kv.put", "forefetch.kv.look_up", "forefetch.kv.get"}
    assert {(span.service, span.trace, span.parent) for span in spans} == {
        ("forefetch-kv", caller.trace_id.hex(), caller.span_id.hex())
    }
    with urllib.request.urlopen(f"http://{one.metrics}/metrics", timeout=5) as page:
        assert "forefetch_kv_stored_total 1.0" in page.read().decode()
    receiver.close()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_block_mb": "0"}, "--max-block-mb: must be at least 1"),
        ({"budget_mb": "63"}, "--budget-mb: must be at least --max-block-mb, which is 64"),
        ({"budget_mb": "much"}, "--budget-mb: 'much' is not a int"),
    ],
)
def test_wrong_settings(settings: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(KvConfig, settings, {})
    assert str(caught.value) == text


def test_settings_from_the_environment() -> None:
    config = build(KvConfig, {"budget_mb": "100"}, {"FOREFETCH_KV_MAX_BLOCK_MB": "3", "FOREFETCH_KV_BUDGET_MB": "7"})
    assert (config.limits.memory, config.limits.disk, config.max_block_bytes) == (100 * MIB, 0, 3 * MIB)
