"""What routers ask and tell a worker beside its calls: what it holds, how much each shard was used, what it is to hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc

from forefetch import rpc
from forefetch.errors import Cancelled
from forefetch.v1 import expert_pb2, expert_pb2_grpc

CALL_S = 5.0
"""Deadline of a call, seconds."""

R = TypeVar("R")


@dataclass(frozen=True)
class Identity:
    """Which process answers, and which of its states."""

    instance_id: str
    generation: int


@dataclass(frozen=True)
class Holdings:
    """`shards` served, of `of`; `capacity` shards at most (0: fixed); `pairs` evaluated by shard since that was loaded."""

    shards: tuple[int, ...]
    of: int
    capacity: int
    pairs: dict[int, int]


class Control:
    """A connection to one worker. Thread-safe. Calls raise ForefetchError."""

    def __init__(self, address: str, tls: rpc.Tls | None = None) -> None:
        self._channel = rpc.channel(address, tls)
        self._stub = expert_pb2_grpc.ExpertServiceStub(self._channel)

    def describe(self) -> Identity:
        """Who it is, and since which change of what it holds."""
        said = _call(lambda: self._stub.Describe(expert_pb2.ExpertServiceDescribeRequest(), timeout=CALL_S))
        return Identity(said.instance_id, said.generation)

    def holdings(self) -> Holdings:
        """What it serves and how much each shard was used."""
        said = _call(lambda: self._stub.Describe(expert_pb2.ExpertServiceDescribeRequest(), timeout=CALL_S))
        stats = _call(lambda: self._stub.GetStats(expert_pb2.ExpertServiceGetStatsRequest(), timeout=CALL_S))
        shards = tuple(said.held_shards)
        return Holdings(shards, said.shards, said.capacity, dict(stats.shard_pairs))

    def place(self, epoch: int, planner: str, shards: Sequence[int]) -> None:
        """Tells it what to hold. StaleEpoch when a later planner has spoken, Mismatch for a worker with a fixed shard."""
        request = expert_pb2.PlaceRequest(epoch=epoch, planner=planner, shards=shards)
        _call(lambda: self._stub.Place(request, timeout=CALL_S))

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()


def _call(call: Callable[[], R]) -> R:
    try:
        return call()
    except grpc.RpcError as error:
        raise rpc.error_of(error) from None
    except ValueError:  # what gRPC says of a closed channel
        raise Cancelled("the connection is closed") from None
