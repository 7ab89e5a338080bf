"""A worker's end of lanes, asked for by hand: what it refuses, and what a router that breaks the protocol costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from waiting import until
from worker_calls import Model

from expert_worker import client
from forefetch import rpc, shm
from forefetch.errors import Mismatch
from forefetch.p2p.lane import LaneShape, Step
from forefetch.p2p.ring import RING_BYTES
from forefetch.process import Process
from forefetch.v1 import expert_pb2, expert_pb2_grpc

pytestmark = pytest.mark.skipif(bool(shm.unsupported()), reason=shm.unsupported())
STEP = {"rows": 2, "parts": 1}


@pytest.fixture
def channel(worker: Process) -> Iterator[grpc.Channel]:
    with rpc.channel(worker.address) as channel:
        yield channel


@pytest.fixture
def hello() -> Iterator[dict[str, Any]]:
    """A request that would be granted, but for memory of the lane itself."""
    ring, data = shm.Segment.create(RING_BYTES, 0), shm.Segment.create(1 << 16, 1 << 16)
    yield {
        **{"ring": ring.name, "ring_nonce": ring.nonce, "data": data.name, "data_nonce": data.nonce},
        **{"rows": 4, "top_k": 2, "patience_ms": 200, "steps": [STEP]},
    }
    ring.unlink()
    data.unlink()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"data": ""}, "INVALID_ARGUMENT"),
        ({"steps": []}, "INVALID_ARGUMENT"),
        ({"steps": [{"rows": 5, "parts": 1}]}, "INVALID_ARGUMENT"),
        ({"steps": [{"rows": 2, "parts": 3}]}, "INVALID_ARGUMENT"),
        ({"steps": [{"rows": 2, "parts": 0}]}, "INVALID_ARGUMENT"),
        ({"top_k": 0}, "INVALID_ARGUMENT"),
        ({"rows": 1 << 20}, "FAILED_PRECONDITION"),
        ({"ring": "forefetch-" + "0" * 32}, "FAILED_PRECONDITION"),
        ({"data_nonce": b"x" * 16}, "FAILED_PRECONDITION"),
        ({"rows": 256}, "FAILED_PRECONDITION"),
        ({"data": "", "meeting": "forefetch-x"}, "FAILED_PRECONDITION"),
    ],
)
def test_what_makes_no_sense_is_refused(
    changes: dict[str, Any], code: str, hello: dict[str, Any], channel: grpc.Channel, model: Model
) -> None:
    request = expert_pb2.OpenLaneRequest(**{**hello, **changes})
    with pytest.raises(grpc.RpcError) as caught:
        next(expert_pb2_grpc.ExpertServiceStub(channel).OpenLane(iter((request,)), timeout=60.0))
    assert caught.value.code().name == code, caught.value.details()  # type: ignore[attr-defined]


def opened(model: Model, worker: Process) -> tuple[client.Link, client.Lane]:
    link = model.connect(worker.address, "auto")
    spec = model.spec
    shape = LaneShape(4, spec.hidden_size, spec.top_k, len(spec.moe_layers), 4)
    how: dict[str, Any] = {"device": torch.device("cpu"), "patience_s": 0.3, "timeout_s": 60.0}
    return link, client.open_lane(link, shape, [Step(2, 1)], **how)


@pytest.mark.parametrize("step", [Step(3, 1), Step(2, 2), Step(2, 0)])
def test_a_step_that_was_not_agreed_on_ends_the_lane_alone(step: Step, model: Model, worker: Process) -> None:
    link, lane = opened(model, worker)
    with closing(link):
        lane.announce(step, 1)
        until(lambda: lane.down)
        assert "not agreed on" in lane.down
        still_answers(link, model)


def test_rows_that_never_come_end_the_lane_alone(model: Model, worker: Process) -> None:
    link, lane = opened(model, worker)
    with closing(link):
        lane.announce(Step(2, 1), 1)
        until(lambda: lane.down)
        assert "no signal within 0.3 s" in lane.down
        still_answers(link, model)


def still_answers(link: client.Link, model: Model) -> None:
    call = model.call()
    expected = model.answer(call).clone()
    link.submit(call)
    assert torch.equal(link.collect(60.0).rows, expected)


def test_a_lane_needs_a_link_to_the_same_node(model: Model, worker: Process) -> None:
    link, lane = opened(model, worker)
    lane.close()
    with closing(link):
        link.info = replace(link.info, shm_domain="elsewhere")
        with pytest.raises(Mismatch, match="another node"):
            client.open_lane(
                link, LaneShape(4, 8, 2, 1, 4), [Step(2, 1)], device=torch.device("cpu"), patience_s=1.0, timeout_s=5.0
            )
