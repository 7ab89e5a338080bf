"""Blocks through memory that a caller and the service share: what comes back, and what every fault ends as."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from forefetch import shm
from forefetch.errors import BadRequest, Cancelled, DeadlineExceeded, Mismatch, Overloaded, Unavailable
from forefetch.lending import Lent
from forefetch.process import Process
from forefetch.settings import child_environment
from kv_service import sharer, sharing
from kv_service.client import Key, KvClient, Pool, chain
from kv_service.shared_frames import FRAME

if TYPE_CHECKING:
    from kv_calls import Kv
from kv_calls import ROOT
from kv_wire import MIB
from waiting import stop, until

pytestmark = pytest.mark.skipif(bool(shm.unsupported()), reason=shm.unsupported())


@pytest.fixture
def client(kv: Kv) -> Iterator[KvClient]:
    """Shares four places of 1 MiB."""
    client = KvClient(kv.address)
    client.share(4, MIB)
    yield client
    client.close()


def placed(client: KvClient, data: bytes) -> memoryview:
    place = client.room(len(data))
    assert place is not None
    place[:] = data
    return place


def test_blocks_come_back_and_places_are_free_again(kv: Kv, client: KvClient) -> None:
    keys, sizes = kv.keys(*range(9)), [1, 100, 4097, MIB, MIB, 1, 64, 65, MIB]
    for key, size in zip(keys, sizes, strict=True):
        assert client.put([(key, placed(client, kv.block(key, size)))]) == (1, 0)
    assert kv.client.get(keys) == [kv.block(key, size) for key, size in zip(keys, sizes, strict=True)]
    stats = client.stats()
    assert (stats.sharers, stats.shared_blocks, stats.stored) == (1, 9, 9)
    client.ping()
    held = [client.room(10) for _ in range(5)]
    assert [place is None for place in held] == [False] * 4 + [True]
    assert client.room(MIB + 1) is None


def test_what_lies_elsewhere_is_sent_and_the_order_stays(kv: Kv, client: KvClient) -> None:
    keys = kv.keys(1, 2, 3, 4)
    blocks = [kv.block(key) for key in keys]
    places = [placed(client, blocks[0]), blocks[1], blocks[2], placed(client, blocks[3])]
    assert client.put(zip(keys, places, strict=True)) == (4, 0)
    assert client.get(keys) == blocks
    assert client.stats().shared_blocks == 2
    assert client.put([(keys[0], placed(client, blocks[0])), (keys[1], placed(client, b"other"))]) == (2, 0)
    assert client.get(keys) == blocks
    assert (client.stats().duplicates, client.stats().conflicts) == (2, 0)  # what is held is not looked at


def test_many_blocks_take_several_frames(kv: Kv) -> None:
    client = KvClient(kv.address)
    client.share(100, 64)
    keys = chain(ROOT, [[block * 2**20 + token for token in range(4096)] for block in range(9)])
    places = [(key, placed(client, b"%d" % key.position)) for key in keys]
    assert client.put(places) == (9, 0)
    assert client.get(keys) == [bytes(place) for _, place in places]
    client.close()


def test_bytes_that_change_before_they_are_copied_are_no_block(
    kv: Kv, client: KvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = kv.keys(1)
    place = placed(client, kv.block(key))
    write = sharing.write_frame

    def torn(area: memoryview, frame: object) -> None:
        write(area, frame)  # type: ignore[arg-type]
        place[50] ^= 1

    monkeypatch.setattr(sharing, "write_frame", torn)
    assert client.put([(key, place)]) == (0, 1)
    assert kv.client.get([key]) == []
    assert kv.client.stats().broken == 1


@pytest.mark.parametrize("fault", ["length", "message", "offset", "key"])
def test_a_frame_that_is_none_ends_the_sharing_and_nothing_else(
    fault: str, kv: Kv, client: KvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = kv.keys(1, 2)

    def wrong(area: memoryview, frame: object) -> None:
        message = frame.SerializeToString()  # type: ignore[attr-defined]
        message = b"\xff" * 20 if fault == "message" else message
        area[8 : 8 + len(message)] = message
        area[:4] = (FRAME if fault == "length" else len(message)).to_bytes(4, "little")

    monkeypatch.setattr(sharing, "write_frame", wrong)
    if fault == "offset":
        monkeypatch.setattr(sharing.Slots, "offset", lambda *_: 4 * MIB - 50)
    key = keys[0]._replace(token_ids=(5,)) if fault == "key" else keys[0]
    with pytest.raises(BadRequest):
        client.put([(key, placed(client, kv.block(key)))])
    assert not client.shares
    assert client.room(10) is None
    until(lambda: kv.client.stats().sharers == 0)
    assert client.put([(key, kv.block(key)) for key in keys]) == (2, 0)
    client.share(1, 100)
    assert client.shares


def test_callers_beyond_the_limit_use_put(kv: Kv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharer, "SHARERS", 1)
    one, two = KvClient(kv.address), KvClient(kv.address)
    one.share(1, 100)
    with pytest.raises(Overloaded):
        two.share(1, 100)
    assert two.put([(kv.keys(1)[0], b"data")]) == (1, 0)
    one.close()
    until(lambda: kv.client.stats().sharers == 0)
    two.share(1, 100)
    two.close()


def test_a_segment_that_cannot_be_made_or_reached(kv: Kv, monkeypatch: pytest.MonkeyPatch) -> None:
    client = KvClient(kv.address)
    with pytest.raises(Mismatch, match="no room"):
        client.share(2**20, 2**40)
    monkeypatch.setattr(sharing, "REPLY_BYTES", 1)
    with pytest.raises(Mismatch, match="no room for a frame"):
        client.share(1, 100)
    monkeypatch.setattr(sharing.shm.Segment, "open", lambda *_: (_ for _ in ()).throw(Mismatch("segment: elsewhere")))
    with pytest.raises(Mismatch, match="elsewhere"):
        client.share(1, 100)
    assert client.put([(kv.keys(1)[0], b"data")]) == (1, 0)
    client.close()


# Pages of the caller's pool

PARTS, PART, PAGES = 3, 70_000, 5


@dataclass
class Lender:
    """A caller whose pool the service reads."""

    client: KvClient
    lent: Lent
    pool: Pool

    def fill(self, page: int, data: bytes) -> None:
        for part in range(PARTS):
            begin = part * self.pool.stride + page * PART
            self.lent.memory[begin : begin + PART] = data[part * PART : (part + 1) * PART]


@pytest.fixture
def lender(kv: Kv) -> Iterator[Lender]:
    lent = Lent(PARTS * PART * PAGES)
    lender = Lender(KvClient(kv.address), lent, Pool(lent.name, PARTS, PART * PAGES, PART, PAGES))
    lender.client.share(1, 1000, pool=lender.pool)
    yield lender
    lender.client.close()


def test_pages_are_read_where_they_are(kv: Kv, lender: Lender) -> None:
    keys = kv.keys(1, 2, 3)
    blocks = [kv.block(key, PARTS * PART) for key in keys]
    for page, block in enumerate(blocks):
        lender.fill(4 - page, block)
    assert lender.client.lends
    assert lender.client.put_pages([(key, 4 - page) for page, key in enumerate(keys)]) == (3, 0)
    lender.fill(4, bytes(PARTS * PART))
    assert kv.client.get(keys) == blocks
    assert lender.client.put_pages([(keys[1], 3), (keys[2], 3)]) == (2, 0)  # the same bytes, and others: not looked at
    assert kv.client.get(keys) == blocks
    assert (kv.client.stats().shared_blocks, kv.client.stats().duplicates, kv.client.stats().conflicts) == (5, 2, 0)


def test_pages_that_were_given_up_while_they_were_read_are_not_kept(
    kv: Kv, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, (key,) = sharing.write_frame, kv.keys(1)

    def leaving(area: memoryview, frame: object) -> None:
        write(area, frame)  # type: ignore[arg-type]
        sharing.give_up(area)

    monkeypatch.setattr(sharing, "write_frame", leaving)
    with pytest.raises((Cancelled, Unavailable)):
        lender.client.put_pages([(key, 1)])
    assert not lender.client.lends
    assert kv.client.look_up([key]) == 0
    assert kv.client.stats().broken == 1


def test_a_page_that_there_is_not(kv: Kv, lender: Lender) -> None:
    with pytest.raises(BadRequest, match=r"blocks\.page"):
        lender.client.put_pages([(kv.keys(1)[0], PAGES)])
    with pytest.raises(Unavailable):
        lender.client.put_pages([(kv.keys(1)[0], 1)])


def test_a_pool_that_cannot_be_read(kv: Kv, lender: Lender) -> None:
    other = KvClient(kv.address)
    other.share(1, 1000, pool=replace(lender.pool, name=lender.lent.name._replace(nonce=bytes(16))))
    assert (other.shares, other.lends) == (True, False)
    assert other._sharing is not None
    huge = replace(lender.pool, name=lender.lent.name._replace(nonce=bytes(16)), parts=1 << 31, stride=1, part_bytes=1)
    other.share(1, 1000, pool=huge)  # whose pages, if they were looked for, would take all memory
    with pytest.raises(BadRequest, match=r"blocks\.page"):
        other._sharing.put_pages([(kv.keys(1)[0], 0)], 5.0)
    with pytest.raises(BadRequest, match="pool"):
        other.share(1, 1000, pool=replace(lender.pool, pages=PAGES + 1))
    other.close()


# Processes that end


@pytest.fixture
def process() -> Iterator[Process]:
    one = Process("kv", "kv_service", ["--budget-mb=8", "--max-block-mb=2"], child_environment(PYTHONWARNINGS="error"))
    one.spawn()
    one.wait_ready(240)
    yield one
    one.end(20)


def test_a_service_that_stops_or_dies_with_a_segment_mapped(kv: Kv, process: Process) -> None:
    client, keys = KvClient(process.address), kv.keys(1, 2, 3)
    client.share(2, 100)
    client.put([(keys[0], placed(client, kv.block(keys[0])))])
    stop(process)
    with pytest.raises(DeadlineExceeded):
        client.put([(keys[1], placed(client, kv.block(keys[1])))], timeout_s=0.3)
    assert not client.shares  # it may still read there
    process.signal(signal.SIGCONT)
    until(lambda: client.stats().sharers == 0)
    client.share(2, 100)
    place = placed(client, kv.block(keys[2]))
    process.signal(signal.SIGKILL)
    with pytest.raises(Unavailable):
        client.put([(keys[2], place)], timeout_s=60.0)
    assert bytes(place) == kv.block(keys[2])
    process.end(20)
    process.spawn()
    process.wait_ready(240)
    client.share(2, 100)
    assert client.put([(keys[2], place), (keys[1], placed(client, b"data"))]) == (2, 0)  # one of them from the old segment
    assert client.get(keys[2:]) == [kv.block(keys[2])]
    client.close()


DYING = """
import sys, time
from kv_service.client import KvClient, chain, child_key
from kv_service import sharing
client = KvClient(sys.argv[1])
client.share(2, 2_000_000)
place = client.room(2_000_000)
place[:1_000_000] = b"x" * 1_000_000
if sys.argv[2] == "announced":
    def announce(self, frame, deadline):
        sharing.write_frame(self._segment.request, frame)
        self._segment.request_bell.ring(1)
        print("ready", flush=True)
        time.sleep(60)
    sharing.Sharing._exchange = announce
    client.put([(chain(bytes(32), [[1, 2]])[0], place)])
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("when", ["writing", "announced"])
def test_a_caller_that_dies_half_way(when: str, kv: Kv) -> None:
    command = [sys.executable, "-c", DYING, kv.address, when]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment()) as caller:
        assert caller.stdout is not None
        caller.stdout.readline()
        caller.kill()
    until(lambda: kv.client.stats().sharers == 0)
    key: Key = chain(bytes(32), [[1, 2]])[0]
    got = kv.client.get([key])
    assert got in ([], [b"x" * 1_000_000 + bytes(1_000_000)])
    assert when == "announced" or got == []
    assert kv.put(kv.keys(1, 2)) == (2, 0)
