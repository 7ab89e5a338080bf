"""How calls of the clients end before their answer does."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing

import pytest
from waiting import PATIENCE_S

from forefetch import Client, SyncClient, errors
from tests.forefetch.fake_router import SHORT_S, FakeRouter, both, run, served


@pytest.fixture
def router() -> Iterator[tuple[FakeRouter, str]]:
    with served() as both_of_it:
        yield both_of_it


@both
def test_a_timeout_is_the_deadline_and_ends_the_request(kind: str, router: tuple[FakeRouter, str]) -> None:
    with pytest.raises(errors.DeadlineExceeded):
        run(kind, router[1], "complete", "endless", timeout=SHORT_S)
    assert router[0].ended.wait(PATIENCE_S)
    with pytest.raises(errors.DeadlineExceeded):
        run(kind, router[1], "stats", timeout=0.1)


def test_leaving_the_iterator_cancels_the_request(router: tuple[FakeRouter, str]) -> None:
    fake, address = router

    async def leave() -> None:
        async with Client(address) as client:
            async with aclosing(client.generate("endless")) as events:
                async for _ in events:
                    break
            assert await asyncio.to_thread(fake.ended.wait, PATIENCE_S)
            fake.ended.clear()
            async for _ in client.generate("endless"):
                break
            assert await asyncio.to_thread(fake.ended.wait, PATIENCE_S)
            fake.ended.clear()
            fake.begun.clear()
            task = asyncio.create_task(client.complete("endless"))
            assert await asyncio.to_thread(fake.begun.wait, PATIENCE_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(fake.ended.wait, PATIENCE_S)

    asyncio.run(leave())
    fake.ended.clear()
    with SyncClient(address) as client:
        for _ in client.generate("endless"):
            break
        assert fake.ended.wait(PATIENCE_S)


def test_closing_the_sync_client_ends_streams_of_other_threads(router: tuple[FakeRouter, str]) -> None:
    fake, address = router
    client = SyncClient(address)
    caught: list[BaseException] = []

    def read() -> None:
        try:
            client.complete("endless")
        except errors.ForefetchError as error:
            caught.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert fake.begun.wait(PATIENCE_S)
    client.close()
    reader.join(PATIENCE_S)
    assert not reader.is_alive()
    assert [type(error) for error in caught] == [errors.Cancelled]
    assert fake.ended.wait(PATIENCE_S)


@both
@pytest.mark.parametrize("timeout", [math.inf, 1e30])
def test_a_deadline_that_never_comes_is_none(kind: str, timeout: float, router: tuple[FakeRouter, str]) -> None:
    assert run(kind, router[1], "complete", [5, 6], timeout=timeout).token_ids == [5, 6]
    assert run(kind, router[1], "describe", timeout=timeout).model == "fake"


@both
def test_a_closed_client_says_so(kind: str, router: tuple[FakeRouter, str]) -> None:
    async def closed() -> None:
        client = Client(router[1])
        await client.complete([5])
        await client.close()
        for call in (client.complete([5]), client.describe()):
            with pytest.raises(errors.Cancelled, match="closed"):
                await call

    if kind == "async":
        asyncio.run(closed())
        return
    client = SyncClient(router[1])
    client.complete([5])
    client.close()
    for call in (lambda: client.complete([5]), client.describe):
        with pytest.raises(errors.Cancelled, match="closed"):
            call()


def test_closing_the_sync_client_ends_the_search_for_a_router() -> None:
    client, caught = SyncClient("127.0.0.1:9,127.0.0.1:9"), []

    def look() -> None:
        try:
            client.complete([5])
        except errors.ForefetchError as error:
            caught.append(type(error))

    looking = threading.Thread(target=look)
    looking.start()
    time.sleep(0.3)
    client.close()
    looking.join(20)
    assert not looking.is_alive()
    assert caught == [errors.Cancelled]
