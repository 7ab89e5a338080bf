"""What routers ask and tell a worker beside its calls: what it holds, how much each expert was used, what it is to hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
class Holdings:
    """What a worker names: MoE layer -> experts, ascending, as of which generation of which process. capacity: most experts
    that it may hold; 0: they are fixed."""

    instance_id: str
    generation: int
    layers: dict[int, tuple[int, ...]]
    capacity: int


class Control:
    """A connection to one worker. Thread-safe. Calls raise ForefetchError."""

    def __init__(self, address: str, tls: rpc.Tls | None = None) -> None:
        self._channel = rpc.channel(address, tls)
        self._stub = expert_pb2_grpc.ExpertServiceStub(self._channel)

    def holdings(self, router: str = "", generation: int = 0) -> Holdings:
        """What it names. A router says who it is, and the generation that its table goes by."""
        request = expert_pb2.ExpertServiceDescribeRequest(router=router, generation=generation)
        said = _call(lambda: self._stub.Describe(request, timeout=CALL_S))
        layers = {one.layer: tuple(one.experts) for one in said.layers}
        return Holdings(said.instance_id, said.generation, layers, said.capacity)

    def pairs(self) -> dict[int, dict[int, int]]:
        """MoE layer -> expert named -> pairs evaluated since the worker began."""
        stats = _call(lambda: self._stub.GetStats(expert_pb2.ExpertServiceGetStatsRequest(), timeout=CALL_S))
        return {one.layer: dict(zip(one.experts, one.pairs, strict=True)) for one in stats.load}

    def place(self, epoch: int, planner: str, layers: Mapping[int, Sequence[int]]) -> None:
        """Tells it what to hold. StaleEpoch when a later planner has spoken, Mismatch for a worker with a fixed shard."""
        experts = [expert_pb2.LayerExperts(layer=layer, experts=held) for layer, held in layers.items()]
        request = expert_pb2.PlaceRequest(epoch=epoch, planner=planner, experts=experts)
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
