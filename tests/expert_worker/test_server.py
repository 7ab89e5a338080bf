"""The service itself: several routers, frames that are none, what it says of itself, who is turned away."""

from __future__ import annotations

import struct
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from worker_calls import WIRED, Model, check

from expert_worker import server
from expert_worker.core import Core, WorkerInfo
from expert_worker.residency import Copied
from forefetch import rpc, shm, wire
from forefetch.errors import BadRequest, ForefetchError, Mismatch, Unavailable
from forefetch.hints import ExpertHint
from forefetch.process import Process
from forefetch.settings import ServiceConfig
from forefetch.v1 import expert_pb2, expert_pb2_grpc
from forefetch.wire import LayerCall, Verified


def test_routers_at_once_get_their_own_answers(model: Model, worker: Process) -> None:
    calls = {name: [model.call(rows) for rows in (1, 17, 64, 3) * 8] for name in ("shm", "grpc", "auto")}
    expected = {name: [model.answer(call) for call in each] for name, each in calls.items()}
    failures: list[BaseException] = []

    def route(name: str) -> None:
        try:
            with closing(model.connect(worker.address, name if name == "grpc" else "auto")) as link:
                for call, rows in zip(calls[name], expected[name], strict=True):
                    link.submit(call)
                    torch.testing.assert_close(link.collect(60.0).rows, rows, rtol=1e-5, atol=1e-5)
        except BaseException as error:
            failures.append(error)

    routers = [threading.Thread(target=route, args=(name,)) for name in calls]
    for router in routers:
        router.start()
    for router in routers:
        router.join(60.0)
    assert not any(router.is_alive() for router in routers)
    assert failures == []


def header(**changes: int) -> bytes:
    values = {"magic": wire.MAGIC, "kind": 1, "dtype": 1, "step": 7, "layer": 0, "rows": 0, "hidden": 64, "pairs": 0, "body": 0}
    v = {**values, **changes}
    first = struct.pack("<IHHQIIII", *(v[k] for k in ("magic", "kind", "dtype", "step", "layer", "rows", "hidden", "pairs")))
    return first + struct.pack("<QQQII32x", 0, 0, 0, 0, v["body"])


def test_malformed_frames_get_error_frames_and_the_stream_goes_on(model: Model, worker: Process) -> None:
    frames = {
        b"": 3,
        b"short": 3,
        bytes(96): 3,
        header(magic=1): 3,
        header(kind=2): 3,
        header(dtype=9): 3,
        header(dtype=3): 9,
        header(hidden=65): 9,
        header(rows=2**32 - 1): 3,
        header(pairs=2**32 - 1): 3,
        header(rows=2, body=512): 3,
        header(layer=99): 3,
        header() + bytes(2**10): 0,  # trailing bytes do no harm
        bytes(2**22): 3,
        header(step=8): 0,
    }
    with rpc.channel(worker.address) as channel:
        requests = (expert_pb2.ForwardRequest(frame=frame) for frame in frames)
        replies = list(expert_pb2_grpc.ExpertServiceStub(channel).Forward(requests, timeout=60.0))
    assert len(replies) == len(frames)
    for (frame, status), reply in zip(frames.items(), replies, strict=True):
        said = wire.HEADER.unpack_from(reply.frame)
        assert said[1] == (wire.ERROR if status else wire.REPLY), frame[:64]
        assert said[11] == status, (frame[:64], reply.frame[96:])
        assert b"/" not in reply.frame[96:], "no paths, no internals"


def test_openshm_refuses_what_it_cannot_map(worker: Process) -> None:
    with rpc.channel(worker.address) as channel:
        stub = expert_pb2_grpc.ExpertServiceStub(channel)

        def refusal(*requests: expert_pb2.OpenShmRequest) -> ForefetchError:
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.OpenShm(iter(requests), timeout=60.0))
            return rpc.error_of(caught.value)

        assert isinstance(refusal(), BadRequest)
        for name in ("", "../../etc/passwd", "forefetch-" + "0" * 32):
            error = refusal(expert_pb2.OpenShmRequest(segment=name, nonce=bytes(16)))
            assert isinstance(error, Mismatch)
            assert "passwd" not in str(error)
        if not shm.unsupported():
            small = shm.Segment.create(1000, 100)
            error = refusal(expert_pb2.OpenShmRequest(segment=small.name, nonce=small.nonce))
            small.unlink()
            assert "no room for a reply" in str(error)


def test_describe_stats_metrics_and_health(model: Model, worker: Process) -> None:
    with rpc.channel(worker.address) as channel, closing(model.connect(worker.address, "grpc")) as link:
        stub = expert_pb2_grpc.ExpertServiceStub(channel)
        before = stub.GetStats(expert_pb2.ExpertServiceGetStatsRequest(), timeout=60.0)
        call = model.call(5)
        check(link, model, call)
        after = stub.GetStats(expert_pb2.ExpertServiceGetStatsRequest(), timeout=60.0)
        assert (after.calls - before.calls, after.rows - before.rows, after.pairs - before.pairs) == (1, 5, 10)
        assert after.routers >= 1
        assert after.compute_ns > before.compute_ns
        assert after.uptime_s > before.uptime_s > 0
        grown = {
            (layer.layer, expert): pairs - old
            for layer, was in zip(after.load, before.load, strict=True)
            for expert, pairs, old in zip(layer.experts, layer.pairs, was.pairs, strict=True)
            if pairs != old
        }
        counts = np.bincount(call.pair_expert)
        assert grown == {(call.layer, e): int(n) for e, n in enumerate(counts) if n}
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", server.SERVICE):
            state = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60.0).status
            assert state == health_pb2.HealthCheckResponse.SERVING
    with urllib.request.urlopen(f"http://{worker.metrics}/metrics", timeout=60) as page:
        text = page.read().decode()
    assert f"forefetch_expert_calls_total {float(after.calls)}" in text
    assert f'forefetch_expert_load_pairs_total{{expert="0",layer="{call.layer}"}}' in text


@pytest.fixture
def service() -> Iterator[tuple[server.ExpertService, str]]:
    """The service in this process, without a core."""
    service = server.ExpertService(0)
    serving = rpc.serve_sync(ServiceConfig(), server.SERVICE, service.register, max_workers=8)
    yield service, serving.address
    serving.stop()


class Nothing:
    """Experts that answer zeros."""

    load = torch.zeros(1, 1, dtype=torch.int64).numpy()
    weight_bytes = 0
    copied = Copied()

    def forward(self, call: LayerCall, out: torch.Tensor, source: str) -> tuple[int, Verified]:
        out.zero_()
        return 0, Verified()

    def hint(self, hint: ExpertHint, source: str) -> bool:
        return True

    def resident(self, layer: int) -> list[int]:
        return []


def test_a_worker_that_is_loading_says_so(model: Model, service: tuple[server.ExpertService, str]) -> None:
    with pytest.raises(Unavailable, match="still loading"):
        model.connect(service[1], "auto")
    assert service[0].stats().calls == 0
    assert not service[0].busy


@pytest.mark.parametrize("kind", WIRED)
def test_a_full_worker_says_so_when_one_connects(
    kind: str, model: Model, service: tuple[server.ExpertService, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = WorkerInfo(model.digest, "m", 0, 1, {0: (0,)}, model.spec.hidden_size, torch.float32, "cpu", "i", 64, shm.domain())
    service[0].core = Core(info, Nothing())
    monkeypatch.setattr(server, "MAX_ROUTERS", 1)
    with closing(model.connect(service[1], kind)):
        with pytest.raises(Unavailable, match="serves 1 routers already"):
            model.connect(service[1], kind)
