"""Routers and a worker process: right answers over each link, clear refusals, several routers at once."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from waiting import until
from worker_calls import WIRED, Model, check

from expert_worker import client, hinting
from expert_worker.wired import GrpcLink
from forefetch import rpc, shm
from forefetch.errors import BadRequest, Mismatch, Unavailable
from forefetch.hints import ExpertHint
from forefetch.process import Process
from forefetch.settings import ServiceConfig
from forefetch.v1 import expert_pb2, expert_pb2_grpc


@pytest.mark.parametrize("kind", WIRED)
def test_answers_are_right_at_every_size(kind: str, model: Model, worker: Process) -> None:
    with closing(model.connect(worker.address, kind)) as link:
        assert link.kind == kind
        assert link.info.layers == dict.fromkeys(model.spec.moe_layers, tuple(range(model.spec.num_experts)))
        for rows in (1, 5, 64, 0, 2, 33, 1):
            check(link, model, model.call(rows))


def test_a_local_link_is_a_link_like_the_others(model: Model) -> None:
    with closing(client.local(client.ExpertConfig(model=str(model.folder)))) as link:
        assert link.kind == "local"
        link.hint(a_hint())
        link.hint(a_hint(1, 99))
        assert link.hints_dropped == 0, "the worker dropped one, the link none"
        check(link, model, model.call(7))
        refusals(link, model)


@pytest.mark.parametrize("kind", WIRED)
def test_a_refused_call_leaves_the_link_usable(kind: str, model: Model, worker: Process) -> None:
    with closing(model.connect(worker.address, kind)) as link:
        refusals(link, model)
        with pytest.raises(BadRequest, match="rows"):
            link.submit(model.call(1000))
        check(link, model, model.call(3))
        for change, names in (
            ({"pair_row": np.array([0, 0, 1, 9], np.int32)}, "pair_row"),
            ({"pair_weight": np.array([0.5, np.nan, 0.5, 0.5], np.float32)}, "pair_weight"),
        ):
            link.submit(dataclasses.replace(model.call(2), **change))
            with pytest.raises(BadRequest, match=names):
                link.collect(60.0)
        check(link, model, model.call(3))


def a_hint(step: int = 1, layer: int = 0, *experts: int) -> ExpertHint:
    return ExpertHint(
        step, 0, layer, 0, np.array(experts or (1, 3), dtype=np.int32), np.full(len(experts) or 2, 0.5, np.float32), 9
    )


@pytest.mark.parametrize("kind", WIRED)
def test_hints_arrive_and_wrong_ones_do_no_harm(kind: str, model: Model, worker: Process) -> None:
    layer = model.spec.moe_layers[-1]
    with rpc.channel(worker.address) as channel, closing(model.connect(worker.address, kind)) as link:
        stub = expert_pb2_grpc.ExpertServiceStub(channel)

        def counts() -> tuple[int, int]:
            stats = stub.GetStats(expert_pb2.ExpertServiceGetStatsRequest(), timeout=60.0)
            return stats.hints, stats.hints_dropped

        taken, dropped = counts()
        link.submit(model.call(3))
        link.hint(a_hint(1, layer))  # while a call is outstanding
        link.collect(60.0)
        for wrong in (a_hint(1, 99), a_hint(1, layer, 2**31 - 1), a_hint(1, layer, 2, 2)):
            link.hint(wrong)
        link.hint(a_hint(2, layer, 5))
        until(lambda: sum(counts()) >= taken + dropped + 5)
        assert counts() == (taken + 2, dropped + 3)
        assert link.hints_dropped == 0
        check(link, model, model.call(3))


def test_residency_is_told_to_whoever_asks(model: Model, worker: Process) -> None:
    layer = model.spec.moe_layers[0]
    ask = expert_pb2.HintRequest(step=5, layer=layer, experts=[1], probabilities=[1.0], want_residency=True)
    with rpc.channel(worker.address) as channel:
        stub = expert_pb2_grpc.ExpertServiceStub(channel)
        said = list(stub.Hint(iter((ask, expert_pb2.HintRequest(layer=layer), ask)), timeout=60.0))
    assert [(response.step, response.layer) for response in said] == [(5, layer)] * 2
    assert list(said[0].resident) == list(range(model.spec.num_experts))


@pytest.mark.parametrize("kind", WIRED)
def test_hints_for_a_worker_that_knows_none_are_dropped(
    kind: str, model: Model, worker: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = expert_pb2_grpc.ExpertServiceStub

    def without_hints(channel: grpc.Channel) -> Any:
        made = stub(channel)
        made.Hint = channel.stream_stream(  # type: ignore[method-assign]
            "/forefetch.v1.ExpertService/Unknown",
            request_serializer=expert_pb2.HintRequest.SerializeToString,
            response_deserializer=expert_pb2.HintResponse.FromString,
        )
        return made

    monkeypatch.setattr(hinting.expert_pb2_grpc, "ExpertServiceStub", without_hints)
    with closing(model.connect(worker.address, kind)) as link:

        def dropped() -> int:
            link.hint(a_hint())
            return link.hints_dropped

        until(dropped)
        check(link, model, model.call(3))


def refusals(link: client.Link, model: Model) -> None:
    """What every kind of link refuses, and how one misuses it."""
    with pytest.raises(RuntimeError, match="no call"):
        link.collect(1.0)
    call = model.call(2)
    for x in (call.x.bfloat16(), call.x[:, 1:]):
        with pytest.raises(Mismatch, match="rows are"):
            link.submit(dataclasses.replace(call, x=x))
    for wrong in ({"layer": 99}, {"pair_expert": np.full(4, 99, np.int32)}):
        link.submit(dataclasses.replace(call, **wrong))  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="not been collected"):
            link.submit(call)
        with pytest.raises(BadRequest, match="99"):
            link.collect(60.0)
    check(link, model, model.call(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digest": "0" * 64}, "another model"),
        ({"hidden": 32}, "the router's 32 x"),
        ({"dtype": torch.bfloat16}, "torch.bfloat16"),
        ({"max_rows": 257}, "--max-rows"),
        ({"experts": "int8"}, "experts are stored, the router expects int8"),
    ],
)
def test_a_worker_that_does_not_fit_is_refused(changes: dict[str, Any], message: str, model: Model, worker: Process) -> None:
    with pytest.raises(Mismatch, match=message):
        model.connect(worker.address, "auto", **changes)


def test_frames_beyond_grpcs_limit_are_refused_at_once(model: Model, worker: Process) -> None:
    with closing(model.connect(worker.address, "grpc")) as link:
        info = link.info
    with rpc.channel(worker.address) as channel, pytest.raises(Mismatch, match="gRPC carries"):
        GrpcLink(worker.address, info, channel, 10**6, 1.0)


def test_nobody_there_and_somebody_else_there(model: Model) -> None:
    with pytest.raises(Unavailable):
        model.connect("127.0.0.1:9", "auto", timeout_s=30.0)
    other = rpc.serve_sync(ServiceConfig(), "other.Service", lambda server: None, max_workers=2)
    try:
        with pytest.raises(Mismatch, match="not an expert worker"):
            model.connect(other.address, "auto")
    finally:
        other.stop()


@pytest.mark.skipif(bool(shm.unsupported()), reason=shm.unsupported())
def test_auto_takes_shared_memory_only_where_both_see_the_same(
    model: Model, worker: Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(model.connect(worker.address, "auto")) as link:
        assert link.kind == "shm"
        domain = link.info.shm_domain
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(shm, "domain", lambda: "another host")
        with closing(model.connect(worker.address, "auto")) as link:
            assert link.kind == "grpc"
    with monkeypatch.context() as mistaken, caplog.at_level(logging.WARNING):
        mistaken.setattr(shm, "FOLDER", tmp_path)  # same domain, it seems, and yet the worker finds nothing
        mistaken.setattr(shm, "domain", lambda: domain)
        with closing(model.connect(worker.address, "auto")) as link:
            assert link.kind == "grpc"
            check(link, model, model.call())
        assert "no shared memory, using gRPC" in caplog.text
        with pytest.raises(Mismatch, match="segment"):
            model.connect(worker.address, "shm")
        assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shm, "unsupported", lambda: "not on this machine")
    with pytest.raises(Mismatch, match="not on this machine"):
        model.connect(worker.address, "shm")
