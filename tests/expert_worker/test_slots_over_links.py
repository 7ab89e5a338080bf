"""Few slots, poisoned and slow to fill, behind every link and on one to three workers: the same bits as with all resident."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from worker_calls import WIRED, Model

from expert_worker import client, server
from expert_worker.core import Core
from expert_worker.experts import Experts
from expert_worker.links import LocalLink
from expert_worker.loading import load
from expert_worker.residency import Wait
from forefetch import rpc
from forefetch.errors import ForefetchError
from forefetch.hints import ExpertHint
from forefetch.settings import ServiceConfig
from forefetch.wire import LayerCall

Fleet = list[tuple[Core, str]]  # a worker's core and its address


def a_core(model: Model, shard: int, shards: int, slots: str) -> Core:
    """A worker with poisoned slots that are filled at a random pace."""
    core = load(client.ExpertConfig(model=str(model.folder), shard=shard, shards=shards, slots=slots, max_rows=64))
    experts, draw = core.experts, random.Random(shard)
    assert isinstance(experts, Experts)
    if experts.residency is not None:
        experts.pool.memory.fill_(255)
        real = experts.residency.start_copy

        def slow(slot: int, number: int) -> Wait:
            time.sleep(draw.random() * 0.002)
            return real(slot, number)

        experts.residency.start_copy = slow
    return core


@pytest.fixture(scope="module", params=[1, 2, 3])
def fleets(request: pytest.FixtureRequest, model: Model) -> Iterator[dict[str, Fleet]]:
    """Workers by slots."""
    shards = request.param
    with ExitStack() as stack:

        def start(shard: int, slots: str) -> tuple[Core, str]:
            service = server.ExpertService(0)
            service.core = a_core(model, shard, shards, slots)
            serving = rpc.serve_sync(ServiceConfig(), server.SERVICE, service.register, max_workers=8)
            stack.callback(serving.stop)
            return service.core, serving.address

        yield {slots: [start(shard, slots) for shard in range(shards)] for slots in ("100%", "60%", "2")}


def total(links: list[client.Link], call: LayerCall, draw: random.Random) -> Tensor:
    """The sum of the workers' rows, in their order. Hints of every kind are sent before, during and after the call."""
    rows = torch.zeros_like(call.x)
    for link in links:
        held = link.info.layers[call.layer]
        keep = np.isin(call.pair_expert, held)
        part = LayerCall(
            call.step, call.layer, call.x, call.pair_row[keep], call.pair_expert[keep], call.pair_weight[keep], call.trace
        )
        for step in (call.step, call.step + 1):
            named = draw.sample(held, min(2, len(held)))
            layer = draw.choice(list(link.info.layers))
            link.hint(ExpertHint(step, 0, layer, 0, np.array(named, np.int32), np.full(len(named), 0.7, np.float32), 10**9))
        link.submit(part)
        link.hint(ExpertHint(call.step, 0, call.layer, 1, np.array(held[:1], np.int32), np.ones(1, np.float32), 10**9))
        rows += link.collect(30.0).rows
    return rows


@pytest.mark.parametrize("kind", ["local", *WIRED])
def test_every_link_and_number_of_workers(kind: str, fleets: dict[str, Fleet], model: Model) -> None:
    draw = random.Random(kind)
    calls = [model.call(rows) for rows in (1, 5, 40, 1, 2, 3) * 3]

    def links(slots: str) -> list[client.Link]:
        if kind == "local":
            return [LocalLink(core) for core, _ in fleets[slots]]
        return [model.connect(address, kind) for _, address in fleets[slots]]

    answers: dict[str, list[Tensor]] = {}
    for slots in fleets:
        connected = links(slots)
        answers[slots] = [total(connected, call, draw) for call in calls]
        for link in connected:
            link.close()
    for index in range(len(calls)):
        for slots in ("60%", "2"):
            assert torch.equal(answers[slots][index], answers["100%"][index]), (slots, index)


@pytest.mark.parametrize("kind", WIRED)
def test_a_failing_copy_reaches_the_router_as_an_error_and_the_link_goes_on(kind: str, model: Model) -> None:
    service = server.ExpertService(0)
    service.core = core = a_core(model, 0, 1, "25%")
    assert isinstance(core.experts, Experts)
    assert core.experts.residency is not None
    serving = rpc.serve_sync(ServiceConfig(), server.SERVICE, service.register, max_workers=8)
    link = model.connect(serving.address, kind)
    try:
        right, core.experts.residency.start_copy = core.experts.residency.start_copy, _fail
        call = model.call(4)
        link.submit(call)
        with pytest.raises(ForefetchError, match="could not be copied"):
            link.collect(20.0)
        assert (core.verified.hits, core.errors) == (0, 1)
        core.experts.residency.start_copy = right
        link.submit(call)
        reply = link.collect(20.0)
        torch.testing.assert_close(reply.rows, model.answer(call), rtol=1e-5, atol=1e-5)
        assert reply.verified.hits == 0
        assert reply.verified.copied_bytes > 0
    finally:
        link.close()
        serving.stop()


def _fail(slot: int, number: int) -> Callable[[], None]:
    raise OSError("no")


def test_too_few_slots_are_refused_with_the_arithmetic(model: Model, checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ForefetchError, match=r"1 slots for the 24 experts .* up to 2 \(top-2\) of the 8 of a layer"):
        load(client.ExpertConfig(model=str(model.folder), slots="5%"))
