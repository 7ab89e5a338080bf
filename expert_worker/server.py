"""The worker's gRPC service: describes itself, and serves each router over a stream or over shared memory.

A router holds one thread of the pool for as long as it is connected; that thread reads its frames, computes and answers, so no
frame changes threads inside the worker. A second one takes its hints.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal, cast

import grpc

from expert_worker import p2p
from expert_worker.core import Core
from expert_worker.hinting import from_message
from expert_worker.placer import Placer
from forefetch import rpc, shm, wire
from forefetch.errors import BadRequest, Mismatch, Overloaded, Unavailable
from forefetch.frames import HEADROOM, FrameBuffer
from forefetch.v1 import expert_pb2

SERVICE = "forefetch.v1.ExpertService"
MAX_ROUTERS = 32
MAX_THREADS = 3 * MAX_ROUTERS + 16  # rows, lane and hints of each router; the rest for unary calls and health watches


class ExpertService:
    """Serves `core` once it is set, UNAVAILABLE until then. spin: ns that a shm link watches for a frame before it sleeps."""

    def __init__(self, spin: int) -> None:
        self.core: Core | None = None
        self.placer: Placer | None = None
        self.routers = self.hinters = self.lanes = 0
        self._spin = spin
        self._guard = threading.Lock()
        self._since = time.monotonic()

    def register(self, server: grpc.Server) -> None:
        """Adds the service. By hand and not by the stub: Forward carries raw messages (see FrameBuffer.seal)."""
        unary = grpc.unary_unary_rpc_method_handler
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Describe": unary(
                self.describe,
                request_deserializer=expert_pb2.ExpertServiceDescribeRequest.FromString,
                response_serializer=expert_pb2.ExpertServiceDescribeResponse.SerializeToString,
            ),
            "GetStats": unary(
                self.get_stats,
                request_deserializer=expert_pb2.ExpertServiceGetStatsRequest.FromString,
                response_serializer=expert_pb2.ExpertServiceGetStatsResponse.SerializeToString,
            ),
            "Place": unary(
                self.place,
                request_deserializer=expert_pb2.PlaceRequest.FromString,
                response_serializer=expert_pb2.PlaceResponse.SerializeToString,
            ),
            "Forward": grpc.stream_stream_rpc_method_handler(self.forward),
            "OpenShm": grpc.stream_stream_rpc_method_handler(
                self.open_shm,
                request_deserializer=expert_pb2.OpenShmRequest.FromString,
                response_serializer=expert_pb2.OpenShmResponse.SerializeToString,
            ),
            "OpenLane": grpc.stream_stream_rpc_method_handler(
                self.open_lane,
                request_deserializer=expert_pb2.OpenLaneRequest.FromString,
                response_serializer=expert_pb2.OpenLaneResponse.SerializeToString,
            ),
            "Hint": grpc.stream_stream_rpc_method_handler(
                self.hint,
                request_deserializer=expert_pb2.HintRequest.FromString,
                response_serializer=expert_pb2.HintResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    @property
    def busy(self) -> bool:
        """A call is being evaluated."""
        return self.core is not None and self.core.busy

    @contextlib.contextmanager
    def _admitted(self, what: Literal["routers", "hinters", "lanes"] = "routers") -> Iterator[Core]:
        """Counts a router in and out."""
        core = self._loaded()
        with self._guard:
            if getattr(self, what) >= MAX_ROUTERS:
                raise Overloaded(f"the worker serves {MAX_ROUTERS} routers already", retry_after_s=5.0)
            self._count(what, 1)
        try:
            yield core
        finally:
            with self._guard:
                self._count(what, -1)

    def _count(self, what: str, by: int) -> None:
        setattr(self, what, getattr(self, what) + by)

    def _loaded(self) -> Core:
        if self.core is None:
            raise Unavailable("the worker is still loading its experts")
        return self.core

    @rpc.sync_handler
    def describe(
        self, request: expert_pb2.ExpertServiceDescribeRequest, context: grpc.ServicerContext
    ) -> expert_pb2.ExpertServiceDescribeResponse:
        """What this worker is and holds."""
        core = self._loaded()
        info = core.info
        if self.placer is not None and request.router:
            self.placer.acknowledge(request.router, request.generation)
        return expert_pb2.ExpertServiceDescribeResponse(
            model_digest=info.model_digest,
            model=info.model,
            shard=info.shard,
            shards=info.shards,
            layers=[expert_pb2.LayerExperts(layer=layer, experts=experts) for layer, experts in info.layers.items()],
            hidden_size=info.hidden_size,
            dtype=cast(Any, wire.DTYPES[info.dtype]),
            device=info.device,
            shm_domain=info.shm_domain,
            instance_id=info.instance_id,
            max_rows=info.max_rows,
            version=info.version,
            expert_format=info.expert_format,
            generation=info.generation,
            capacity=info.capacity,
            row_pairs=info.row_pairs,
            lanes=p2p.kind_of(core),
            moves=info.moves,
        )

    @rpc.sync_handler
    def place(self, request: expert_pb2.PlaceRequest, context: grpc.ServicerContext) -> expert_pb2.PlaceResponse:
        """The planner's command."""
        self._loaded()
        if self.placer is None:
            raise Mismatch("this worker holds a fixed shard; start it with --placed to have it told")
        wanted = [(one.layer, expert) for one in request.experts for expert in one.experts]
        return expert_pb2.PlaceResponse(missing=self.placer.command(request.epoch, request.planner, wanted))

    @rpc.sync_handler
    def get_stats(
        self, request: expert_pb2.ExpertServiceGetStatsRequest, context: grpc.ServicerContext
    ) -> expert_pb2.ExpertServiceGetStatsResponse:
        """Counters."""
        return self.stats()

    def stats(self) -> expert_pb2.ExpertServiceGetStatsResponse:
        """Counters since start; zeros while loading."""
        stats = expert_pb2.ExpertServiceGetStatsResponse(uptime_s=time.monotonic() - self._since, routers=self.routers)
        core = self.core
        if core is not None:
            for name in ("calls", "rows", "pairs", "errors", "compute_ns", "copy_wait_ns", "hints", "hints_dropped"):
                setattr(stats, name, getattr(core, name))
            for name, value in core.verified._asdict().items():
                setattr(stats, name, value)
            evaluator = core.experts
            stats.copies_failed = evaluator.copied.failed
            stats.weight_bytes = evaluator.weight_bytes
            layers = core.info.layers
            for layer, pairs in evaluator.pairs_of(layers).items():
                stats.load.add(layer=layer, experts=layers[layer], pairs=pairs)
            if self.placer is not None:
                stats.experts_loaded, stats.experts_unloaded = self.placer.loaded, self.placer.unloaded
        return stats

    @rpc.sync_handler
    def forward(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answers frame after frame; one that is malformed gets an error frame, and the stream goes on."""
        with self._admitted() as core:
            context.send_initial_metadata(())  # tells the router that it was admitted
            request = FrameBuffer.allocate(core.info.request_room(core.info.max_rows))
            reply = FrameBuffer.allocate(core.info.reply_room(core.info.max_rows))
            source = context.peer()
            for message in messages:
                yield reply.seal(_answer(core, message, request, reply, source))

    @rpc.sync_handler
    def hint(
        self, messages: Iterator[expert_pb2.HintRequest], context: grpc.ServicerContext
    ) -> Iterator[expert_pb2.HintResponse]:
        """Takes hints in as they come; answers those that ask for it."""
        with self._admitted("hinters") as core:
            for message in messages:
                core.hint(from_message(message), context.peer())
                if message.want_residency:
                    resident = core.experts.resident(message.layer)
                    yield expert_pb2.HintResponse(step=message.step, layer=message.layer, resident=resident)

    @rpc.sync_handler
    def open_shm(
        self, requests: Iterator[expert_pb2.OpenShmRequest], context: grpc.ServicerContext
    ) -> Iterator[expert_pb2.OpenShmResponse]:
        """Maps the router's segment, says so, and serves it until the stream ends."""
        with self._admitted() as core:
            hello = next(requests, None)
            if hello is None:
                raise BadRequest("segment", "no segment was named")
            segment = shm.Segment.open(hello.segment, hello.nonce)
            if len(segment.reply) < HEADROOM + core.info.reply_room(0):
                raise Mismatch("segment: has no room for a reply")
            ended = threading.Event()

            def leave() -> None:
                ended.set()
                segment.request_bell.nudge()

            if context.add_callback(leave):
                yield expert_pb2.OpenShmResponse(instance_id=core.info.instance_id)
                self._serve(core, segment, ended, context.peer())

    @rpc.sync_handler
    def open_lane(
        self, requests: Iterator[expert_pb2.OpenLaneRequest], context: grpc.ServicerContext
    ) -> Iterator[expert_pb2.OpenLaneResponse]:
        """Makes the worker's end of a lane, says so, and follows the router's steps until the stream ends or the lane fails."""
        with self._admitted("lanes") as core:
            hello = next(requests, None)
            if hello is None:
                raise BadRequest("ring", "no lane was described")
            generation = core.info.generation
            lane = p2p.follow(core, hello, context.peer())
            try:
                if context.add_callback(lane.leave):
                    yield expert_pb2.OpenLaneResponse(instance_id=core.info.instance_id, generation=generation)
                    lane.follow(self._spin)
            finally:
                lane.close()

    def _serve(self, core: Core, segment: shm.Segment, ended: threading.Event, source: str) -> None:
        request, reply = FrameBuffer(segment.request), FrameBuffer(segment.reply)
        seen = spin = 0
        while not ended.is_set():
            if segment.request_bell.wait(seen, spin):
                seen, spin = segment.request_bell.value, self._spin
                core.answer(request, len(request), reply, source)
                segment.reply_bell.ring(seen)
            else:
                spin = 0


def _answer(core: Core, message: bytes, request: FrameBuffer, reply: FrameBuffer, source: str) -> int:
    try:
        size = request.unseal(message)
    except BadRequest as error:
        return core.refuse(request, 0, reply, error)
    return core.answer(request, size, reply, source)
