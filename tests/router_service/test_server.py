"""The API over a real connection, with an engine whose trunk counts: what callers do to a router that serves others too."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from forefetch import rpc
from forefetch.rpc.auth import Authenticator
from forefetch.v1 import router_pb2, router_pb2_grpc
from router_service.admission import Limits
from router_service.asking import Reader
from router_service.callers import Callers
from router_service.conversations import Conversations
from router_service.pages import PagePool
from router_service.scheduler import Scheduler
from router_service.server import Deliverer, RouterServicer
from tests.router_service.test_engine import PAGE, VOCAB, Rig, make_rig

CONTEXT, MOST = 200, 6
LONG = CONTEXT - 3  # with twenty alternatives a token that is 150 kB, more than a connection holds unread: 64
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16 << 10)]


@dataclass
class Api:
    """A served rig. `callers`: the calls that are open."""

    rig: Rig
    callers: Callers
    address: str
    loop: asyncio.AbstractEventLoop

    def generate(self, tokens: int, channel: grpc.Channel | None = None, **fields: Any) -> Any:
        stub = router_pb2_grpc.RouterServiceStub(channel or rpc.channel(self.address))
        prompt, stop = router_pb2.TokenPrompt(ids=[0, 1, 2]), router_pb2.StopParams(max_tokens=tokens)
        return stub.Generate(router_pb2.GenerateRequest(tokens=prompt, stop=stop, **fields), timeout=600)

    def unread(self) -> Any:
        """A call whose answer does not fit into its connection, of which nothing is read."""
        return self.generate(LONG, rpc.channel(self.address, options=SMALL_WINDOW), top_logprobs=20)

    def lose_patience(self) -> None:
        """As if a minute had passed."""
        self.callers._patience_s = 0.01
        self.loop.call_soon_threadsafe(self.callers._look)

    def answered(self) -> None:
        """Returns when every answer is complete, read or not."""
        until(lambda: not self.rig.engine.busy)


def until(condition: Callable[[], Any], timeout_s: float = 300.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def tokens_of(call: Any) -> tuple[list[int], grpc.RpcError | None]:
    """What came, and the error behind it."""
    tokens: list[int] = []
    try:
        for response in call:
            if response.HasField("token"):
                tokens.append(response.token.token_id)
    except grpc.RpcError as error:
        return tokens, error
    return tokens, None


@pytest.fixture
def api() -> Iterator[Api]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def wait(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    rig = make_rig(ahead=False, deliver=Deliverer(loop))
    rig.engine.parts.scheduler = rig.scheduler = Scheduler(
        PagePool(1 + 4 * CONTEXT // PAGE), page_size=PAGE, max_batch=4, max_step_tokens=16, max_waiting=4
    )
    rig.engine.parts.buffers._table.resize_(4, CONTEXT // PAGE)
    callers, server = wait(served(rig))
    rig.engine.start()
    yield Api(rig, callers, server.address, loop)
    rig.engine.stop()
    wait(server.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


async def served(rig: Rig) -> tuple[Callers, Any]:
    from router_service.config import RouterConfig

    callers, reader = Callers(MOST, 600.0), Reader(Limits(VOCAB, CONTEXT, 16), None)
    status: Any = SimpleNamespace(approximations=lambda shadowed: router_pb2.Approximations())
    parts = rig.engine, reader, Conversations(None, reader, "m", ""), rig.engine.parts.recorder, status
    servicer = RouterServicer(*parts, Authenticator(), callers)
    config = RouterConfig(model="m", listen="127.0.0.1:0", reflection=False)
    server = await rpc.serve_aio(
        config, "forefetch.v1.RouterService", lambda s: router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, s)
    )
    return callers, server


COUNTED = [(3 + index) % VOCAB for index in range(LONG)]


def test_streams_that_nobody_reads_end_and_say_so_behind_what_was_sent(api: Api) -> None:
    calls = [api.unread() for _ in range(2)]
    until(lambda: len(api.callers) == 2)
    api.answered()
    assert tokens_of(api.generate(5)) == (COUNTED[:5], None), "others are served meanwhile"
    until(lambda: len(api.callers) == 2)  # whose answers wait for them
    api.lose_patience()
    until(lambda: len(api.callers) == 0)
    for call in calls:
        tokens, error = tokens_of(call)
        assert 0 < len(tokens) < LONG
        assert tokens == COUNTED[: len(tokens)]
        assert error is not None
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "nothing of the stream was read" in error.details()


def test_so_many_streams_are_open_at_a_time_unread_ones_included(api: Api) -> None:
    calls = []
    for _ in range(MOST):
        calls.append(api.unread())
        until(lambda: len(api.callers) == len(calls))
        api.answered()
    tokens, error = tokens_of(api.generate(5))
    assert tokens == []
    assert error is not None
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "calls are open" in error.details()
    with pytest.raises(grpc.RpcError, match="calls are open"):
        router_pb2_grpc.RouterServiceStub(rpc.channel(api.address)).Tokenize(router_pb2.TokenizeRequest(), timeout=600)
    calls.pop().cancel()
    until(lambda: len(api.callers) == MOST - 1)
    assert tokens_of(api.generate(5)) == (COUNTED[:5], None)
    for call in calls:
        call.cancel()


def test_a_reader_who_reads_is_waited_for_anew(api: Api) -> None:
    call = api.unread()
    until(lambda: len(api.callers) == 1)
    api.answered()
    (caller,) = api.callers._open
    tokens, since = [], 0.0
    while len(tokens) < LONG:
        until(lambda before=since: caller.waits_since > before or not len(api.callers))  # type: ignore[misc]
        since = caller.waits_since
        tokens += [next(call).token.token_id for _ in range(min(50, LONG - len(tokens)))]
    assert tokens == COUNTED
    assert next(call).HasField("finish")


def test_an_unread_stream_that_is_cancelled_ends_its_request_at_once(api: Api) -> None:
    api.rig.trunk.gate.clear()
    call = api.unread()
    until(lambda: api.rig.scheduler.running)
    call.cancel()
    until(lambda: len(api.callers) == 0)
    api.rig.trunk.gate.set()
    api.answered()
    assert api.rig.trunk.steps <= 2
    until(lambda: api.rig.scheduler.pool.used == 0)


def test_an_id_that_is_running_is_refused_and_free_again_behind_it(api: Api) -> None:
    api.rig.trunk.gate.clear()
    first = api.generate(5, request_id="mine")
    until(lambda: api.rig.scheduler.running)
    _, error = tokens_of(api.generate(5, request_id="mine"))
    assert error is not None
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    api.rig.trunk.gate.set()
    assert tokens_of(first) == (COUNTED[:5], None)
    until(lambda: len(api.callers) == 0)
    assert tokens_of(api.generate(5, request_id="mine")) == (COUNTED[:5], None)
