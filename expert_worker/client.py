"""Links to expert workers, for routers: in this process, over shared memory, or over gRPC.

`connect` chooses between shm and grpc by what the worker's Describe says; `local` builds a worker here. Whichever it is, a
`Link` carries one call at a time: submit, do something else, collect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import grpc
import torch

from expert_worker.config import ExpertConfig, spin_ns
from expert_worker.control import Control, Holdings
from expert_worker.core import WorkerInfo
from expert_worker.links import Link, LocalLink
from expert_worker.loading import load
from expert_worker.p2p_link import Lane, open_lane
from expert_worker.twin import TwinLink
from expert_worker.wired import GrpcLink, ShmLink
from forefetch import rpc, shm, wire
from forefetch.errors import Mismatch, Unavailable
from forefetch.kernels import compiled
from forefetch.v1 import expert_pb2, expert_pb2_grpc

if TYPE_CHECKING:
    from expert_worker.p2p_beside import Beside
    from expert_worker.packed import PackedExperts
    from expert_worker.whole import WholeExperts
    from forefetch.kernels.grouped_mlp.formats import Kind
    from forefetch.p2p.lane import LaneShape
    from forefetch.spec import ModelSpec
    from forefetch.weights import Checkpoint

__all__ = [
    "Beside",
    "Control",
    "ExpertConfig",
    "Holdings",
    "Lane",
    "Link",
    "WholeExperts",
    "WorkerInfo",
    "beside",
    "connect",
    "local",
    "open_lane",
    "resident",
    "resident_of",
    "twin",
    "whole_of",
]

log = logging.getLogger("forefetch.expert.client")


def connect(
    address: str,
    *,
    link: str,
    digest: str,
    hidden: int,
    dtype: torch.dtype,
    max_rows: int,
    tls: rpc.Tls | None,
    timeout_s: float,
    spin_us: int = -1,
    experts: str = "stored",
) -> Link:
    """A link to the worker at host:port. link: "auto", "shm" or "grpc"; auto takes shm where both see the same memory.

    experts: how weights may have been rounded, see `ExpertConfig.rounding`.
    Raises Mismatch when the worker serves another model, format, type or width, takes fewer than `max_rows` rows in a frame,
    or shm is forced and cannot be; Unavailable when it cannot be reached in time or is still loading.
    """
    if link == "shm" and shm.unsupported():
        raise Mismatch(shm.unsupported())
    channel = rpc.channel(address, tls)
    try:
        info = _describe(channel, timeout_s)
        _check(info, digest, hidden, dtype, max_rows)
        if info.expert_format != experts:
            raise Mismatch(
                f"the worker's experts are {info.expert_format}, the router expects {experts} (its --experts and --miss)"
            )
        if link == "shm" or (link == "auto" and info.shm_domain and info.shm_domain == shm.domain()):
            try:
                return ShmLink(address, info, channel, max_rows, timeout_s, spin_ns(spin_us, info.shards))
            except Mismatch as error:
                if link == "shm":
                    raise
                log.warning("worker %s: no shared memory, using gRPC: %s", address, error)
        return GrpcLink(address, info, channel, max_rows, timeout_s)
    except BaseException:
        channel.close()
        raise


def twin(connect: Callable[[], Link]) -> Link:
    """Two links that `connect` makes as one that carries two calls at a time. Raises what that raises, or Unavailable."""
    first = connect()
    try:
        second = connect()
    except BaseException:
        first.close()
        raise
    return TwinLink(first, second)


def local(config: ExpertConfig) -> Link:
    """A worker in this process: loads the shard. Raises ConfigError or UnsupportedModel."""
    return LocalLink(load(config, local=True))


def resident(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    kind: Kind,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_rows: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> PackedExperts:
    """All of a model's experts on one GPU, stored as `kind`, for callers that build their own step around them."""
    from expert_worker.packed import PackedExperts, packed_format

    everything = range(spec.num_experts)
    place = {"device": device, "dtype": dtype, "max_rows": max_rows, "on_progress": on_progress}
    return PackedExperts(spec, checkpoint, everything, packed_format(spec, kind, dtype, device), **place)  # type: ignore[arg-type]


def beside(link: Link, shape: LaneShape, device: torch.device) -> Beside | None:
    """The lane to a worker in this process; None if that is another's. Mismatch when it can have none."""
    if not isinstance(link, LocalLink):
        return None
    from expert_worker.p2p_beside import Beside

    return Beside(link, shape, device)


def resident_of(link: Link | None) -> PackedExperts | None:
    """The experts behind a local link, if all of the model's are on a GPU and need no host to be evaluated."""
    if not isinstance(link, LocalLink) or not link.info.device.startswith("cuda"):
        return None
    from expert_worker.packed import PackedExperts

    experts = link.core.experts
    return experts if isinstance(experts, PackedExperts) and len(experts.held) == experts.spec.num_experts else None


def whole_of(link: Link | None) -> WholeExperts | None:
    """The experts behind a local link, if compiled kernels can evaluate whole steps with them on a CPU."""
    if not isinstance(link, LocalLink) or link.info.device != "cpu" or not compiled.available():
        return None
    from expert_worker.whole import WholeExperts

    return WholeExperts.of(link.core)


def _describe(channel: grpc.Channel, timeout_s: float) -> WorkerInfo:
    try:
        said = expert_pb2_grpc.ExpertServiceStub(channel).Describe(expert_pb2.ExpertServiceDescribeRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        meant = rpc.error_of(error)
        if cast(Any, error).code() is grpc.StatusCode.UNIMPLEMENTED:
            raise Mismatch("what serves at this address is not an expert worker") from None
        raise meant if isinstance(meant, Mismatch | Unavailable) else Unavailable(str(meant)) from None
    dtypes = {code: dtype for dtype, code in wire.DTYPES.items()}
    if said.dtype not in dtypes:
        raise Mismatch("the worker computes in a type that this router does not know")
    return WorkerInfo(
        model_digest=said.model_digest,
        model=said.model,
        shard=said.shard,
        shards=said.shards,
        layers={layer.layer: tuple(layer.experts) for layer in said.layers},
        hidden_size=said.hidden_size,
        dtype=dtypes[said.dtype],
        device=said.device,
        instance_id=said.instance_id,
        max_rows=said.max_rows,
        shm_domain=said.shm_domain,
        version=said.version,
        generation=said.generation,
        capacity=said.capacity,
        row_pairs=said.row_pairs,
        expert_format=said.expert_format or "stored",
        lanes=said.lanes,
        moves=said.moves,
    )


def _check(info: WorkerInfo, digest: str, hidden: int, dtype: torch.dtype, max_rows: int) -> None:
    if info.model_digest != digest:
        raise Mismatch(f"the worker serves another model: {info.model} ({info.model_digest[:12]}, not {digest[:12]})")
    if (info.dtype, info.hidden_size) != (dtype, hidden):
        raise Mismatch(f"the worker's rows are {info.hidden_size} x {info.dtype}, the router's {hidden} x {dtype}")
    if info.max_rows < max_rows:
        raise Mismatch(f"the worker takes {info.max_rows} rows in a frame (its --max-rows), the router may send {max_rows}")
