"""The outbox by scenario: no threads, no service."""

from __future__ import annotations

from kv_service.client import Key
from router_service.outbox import BATCH_BYTES, Outbox


def key(request: int, index: int) -> Key:
    return Key(bytes([request, index]), bytes([request, index - 1]) if index else b"", (request, index))


def outbox(room: int = 10) -> Outbox:
    return Outbox(room)


def offer(box: Outbox, request: int, index: int) -> bool:
    return box.offer(request, key(request, index), 10 * request + index, None)


def copy_all(box: Outbox, data: bytes = b"data") -> list[int]:
    """The pages, in the order of their copies."""
    pages = []
    while box.copyable:
        block = box.take()
        pages.append(block.page)
        box.copied(block, data)
    return pages


def send_all(box: Outbox) -> list[tuple[int, ...]]:
    """The tokens of the blocks, in the order sent."""
    sent: list[tuple[int, ...]] = []
    while box.ready:
        batch = box.batch()
        assert all(block.data for block in batch)
        sent += [block.key.token_ids for block in batch]
        box.finish(batch, len(batch))
    return sent


def test_blocks_are_chained_copied_and_sent_in_order() -> None:
    box = outbox()
    assert [offer(box, 1, 0), offer(box, 2, 0), offer(box, 1, 1)] == [True] * 3
    assert copy_all(box) == box.unpinned == [10, 20, 11]
    batch = box.batch()
    assert batch[2].key.parent == batch[0].key.digest
    box.put_back(batch)
    assert send_all(box) == [(1, 0), (2, 0), (1, 1)]
    assert (box.used, box.sent, box.dropped, box.waiting) == (0, 3, 0, 0)


def test_without_room_blocks_follow_later_and_never_before_an_earlier_one() -> None:
    box = outbox(room=1)
    assert [offer(box, 1, 0), offer(box, 1, 1)] == [True, False]
    copy_all(box)
    assert send_all(box) == [(1, 0)]
    assert offer(box, 1, 2) is False  # there is room, but block 1 is not queued yet
    assert box.waiting == 2
    assert copy_all(box) == [11]
    assert box.unpinned == [10]
    assert send_all(box) == [(1, 1)]
    copy_all(box)
    assert send_all(box) == [(1, 2)]
    assert offer(box, 1, 3) is True


def test_an_ended_request_keeps_what_is_queued_and_drops_the_rest() -> None:
    box = outbox(room=2)
    for index in range(5):
        offer(box, 1, index)
    box.forget(1)
    box.forget(7)
    assert (box.dropped, box.waiting) == (3, 2)
    assert copy_all(box) == [10, 11]
    box.restart()
    assert send_all(box) == [(1, 0), (1, 1)]


def test_a_copy_without_a_pin_counts_only_while_its_request_lives() -> None:
    box = outbox(room=1)
    offer(box, 1, 0)
    offer(box, 1, 1)
    copy_all(box)
    send_all(box)
    block = box.take()
    box.forget(1)
    box.copied(block, b"something else")
    assert not box.ready
    assert (box.used, box.sent, box.dropped) == (0, 1, 1)


def test_a_restart_sends_live_requests_again_from_the_first_block() -> None:
    box = outbox()
    for index in range(3):
        offer(box, 1, index)
    offer(box, 2, 0)
    copy_all(box)
    send_all(box)
    offer(box, 1, 3)  # pinned, not copied
    box.forget(2)
    box.restart()
    assert box.unpinned == [10, 11, 12, 20, 13]
    assert box.waiting == 4
    assert copy_all(box) == [10, 11, 12, 13]
    assert send_all(box) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert (box.restarts, box.used, box.dropped) == (1, 0, 0)


def test_a_restart_while_a_block_is_copied() -> None:
    box = outbox()
    offer(box, 1, 0)
    block = box.take()
    box.restart()
    box.copied(block, b"data")
    assert box.unpinned == [10]
    assert copy_all(box) == [10]
    assert send_all(box) == [(1, 0), (1, 0)]
    assert (box.used, box.unpinned) == (0, [10])


def test_batches_are_bounded() -> None:
    box = outbox()
    for index in range(5):
        offer(box, 1, index)
    copy_all(box, bytes(BATCH_BYTES // 2))
    assert [len(box.batch()) for _ in range(3)] == [2, 2, 1]
    offer(box, 1, 5)
    copy_all(box, bytes(2 * BATCH_BYTES))
    assert len(box.batch()) == 1


def test_adopted_blocks_are_sent_only_after_a_restart() -> None:
    box = outbox()
    for index in range(2):
        box.adopt(1, key(1, index), 10 + index)
    assert not box.copyable
    assert offer(box, 1, 2) is True
    copy_all(box)
    assert send_all(box) == [(1, 2)]
    box.restart()
    assert copy_all(box) == [10, 11, 12]
    assert send_all(box) == [(1, 0), (1, 1), (1, 2)]
    box.forget(1)
    assert (box.dropped, box.used, box.waiting) == (0, 0, 0)
