"""What cluster tests say to a router: plain generated stubs, so that they test the wire and not our client."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from waiting import PATIENCE_S, until

from forefetch import rpc
from forefetch.cluster import Cluster
from forefetch.v1 import router_pb2, router_pb2_grpc

Start = Callable[..., Cluster]

LONG_S = 120.0
"""Within which a stream of this model ends, whatever else the machine does."""

# Small pages and steps, so that prompts of some dozen tokens span pages and are prefilled in chunks.
SMALL = ("--page-size=16", "--max-batch=16", "--max-step-tokens=20", "--kv-memory-mb=8")

# Nothing of this may reach a client: folders, source files, stack traces, addresses of objects.
INTERNALS = re.compile(r"/\w+/|Traceback|File \"|\.py\b|0x[0-9a-f]{6}|<class|Exception")


@dataclass
class Answer:
    """A stream that ended in OK."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    events: list[Any] = field(default_factory=list)
    finish: Any = None


def request(ids: Sequence[int], n: int, **more: Any) -> router_pb2.GenerateRequest:
    """Greedy, n tokens, past the end of sequence, unless `more` (fields of GenerateRequest) says otherwise."""
    fields: dict[str, Any] = {
        "tokens": router_pb2.TokenPrompt(ids=ids),
        "sampling": router_pb2.SamplingParams(temperature=0.0),
        "stop": router_pb2.StopParams(max_tokens=n, ignore_eos=True),
        **more,
    }
    return router_pb2.GenerateRequest(**fields)


class Router:
    """A connection to one router."""

    def __init__(self, address: str) -> None:
        self.channel = rpc.channel(address)
        self.stub = router_pb2_grpc.RouterServiceStub(self.channel)

    def close(self) -> None:
        self.channel.close()

    def generate(self, ids: Sequence[int], n: int, timeout: float = LONG_S, **more: Any) -> Answer:
        """The whole answer. Checks that indices have no gaps and that nothing follows the finish event."""
        answer = Answer()
        for response in self.stub.Generate(request(ids, n, **more), timeout=timeout):
            assert answer.finish is None, "an event after the finish event"
            if response.HasField("finish"):
                answer.finish = response.finish
                answer.text += response.finish.text
            else:
                assert response.token.index == len(answer.tokens)
                answer.tokens.append(response.token.token_id)
                answer.events.append(response.token)
                answer.text += response.token.text
        assert answer.finish is not None, "the stream ended without a finish event"
        return answer

    def stats(self) -> router_pb2.GetStatsResponse:
        return self.stub.GetStats(router_pb2.GetStatsRequest(), timeout=PATIENCE_S)

    def describe(self) -> router_pb2.DescribeResponse:
        return self.stub.Describe(router_pb2.DescribeRequest(), timeout=PATIENCE_S)

    def lanes_carry(self, prompt: Sequence[int]) -> None:
        """Returns when steps cross over p2p lanes."""

        def moved() -> bool:
            before = self.stats().p2p_steps
            self.generate(prompt, 2)
            return self.stats().p2p_steps > before

        until(moved, every=0.2)


class Background:
    """A stream read on a thread: `tokens` grow, then `error` or `finish` is set."""

    def __init__(self, router: Router, ids: Sequence[int], n: int, timeout: float = LONG_S, **more: Any) -> None:
        self.start(router.stub.Generate(request(ids, n, **more), timeout=timeout))

    def start(self, call: Any) -> None:
        """Reads a call's stream."""
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.finish: Any = None
        self.error: grpc.RpcError | None = None
        self.call = call
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for response in self.call:
                if response.HasField("finish"):
                    self.finish = response.finish
                else:
                    self.tokens.append(response.token.token_id)
                    self.times.append(time.monotonic())
        except grpc.RpcError as error:
            self.error = error

    def wait_for(self, tokens: int) -> None:
        """Returns when that many tokens have come."""
        until(lambda: len(self.tokens) >= tokens or not self.thread.is_alive())
        assert len(self.tokens) >= tokens, self.error

    def done(self, timeout: float = LONG_S) -> Background:
        """Waits for the end of the stream."""
        self.thread.join(timeout)
        assert not self.thread.is_alive(), "the stream did not end in time"
        return self


TRIES = 20
"""Streams of this model last a fraction of a second, and a test may get no core for as long; but not every time."""


def caught(
    begin: Callable[[], list[Background]], after: int, strike: Callable[[], Any], undo: Callable[[], Any]
) -> list[Background]:
    """Streams that stand still since `strike`, which came when all had `after` tokens and before any had ended. Where one had
    ended, `undo` lets the others end, and new ones are begun."""
    for _ in range(TRIES):
        streams = begin()
        for stream in streams:
            stream.wait_for(after)
        strike()
        seen: list[int] = []

        def still(streams: list[Background] = streams, seen: list[int] = seen) -> bool:
            before, seen[:] = list(seen), [len(stream.tokens) for stream in streams]
            return before == seen

        until(still, every=0.2)
        if all(stream.finish is None for stream in streams):
            return streams
        undo()
        for stream in streams:
            stream.done()
    raise AssertionError("streams always end before anything can happen to them")


def details(error: grpc.RpcError) -> Iterator[Any]:
    """The rich details of a status: BadRequest, RetryInfo, ErrorInfo."""
    status = rpc_status.from_call(error)
    for packed in status.details if status else ():
        for kind in (error_details_pb2.BadRequest, error_details_pb2.RetryInfo, error_details_pb2.ErrorInfo):
            if packed.Is(kind.DESCRIPTOR):
                message = kind()
                packed.Unpack(message)
                yield message


def assert_fit_for_a_client(error: grpc.RpcError) -> None:
    """The status's text shows no internals and says something."""
    text = error.details()
    assert text
    assert not INTERNALS.search(text), text
    for detail in details(error):
        assert not INTERNALS.search(str(detail)), detail
