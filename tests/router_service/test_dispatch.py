"""Dispatch over links made of plain objects: who gets which rows, what is added, and what a lost worker leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from reference_model import CASES, build
from waiting import until

from forefetch.errors import LinkDown, Mismatch, Unavailable
from forefetch.spec import ModelSpec
from forefetch.telemetry.ring import StepRing
from forefetch.wire import LayerCall, LayerReply
from router_service.batch import StepBatch
from router_service.dispatch import Dispatch
from router_service.workers import Workers

LAYER = 1


@dataclass
class Info:
    layers: dict[int, tuple[int, ...]]
    shard: int = 0
    shards: int = 1


@dataclass
class FakeLink:
    """Answers each row with the sum of weight * (expert + 1); dies where told."""

    info: Info
    kind: str = "fake"
    die_on: str = ""
    calls: list[LayerCall] = field(default_factory=list)
    closed: bool = False
    hints_dropped: int = 0
    open_calls: int = 0
    most: int = 1
    refuse: bool = False

    def submit(self, call: LayerCall) -> None:
        if self.die_on == "submit":
            raise LinkDown(-1, "gone")

        assert self.open_calls < self.most, "more calls at a time than agreed"
        self.open_calls += 1
        self.calls.append(call)

    def collect(self, timeout_s: float) -> LayerReply:
        if self.die_on == "collect":
            raise LinkDown(-1, "gone")
        call = self.calls[-self.open_calls]
        self.open_calls -= 1
        if self.refuse:
            raise Mismatch("no")
        rows = torch.zeros_like(call.x)
        value = torch.from_numpy(call.pair_weight * (call.pair_expert + 1).astype(np.float32))
        rows.index_add_(0, torch.from_numpy(call.pair_row), value[:, None].expand(-1, rows.shape[1]).contiguous())
        return LayerReply(rows=rows, queue_ns=1, copy_wait_ns=2, compute_ns=3, round_trip_ns=6)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return ModelSpec.load(build(CASES["qwen3"], tmp_path_factory.mktemp("dispatch")))


def shards(spec: ModelSpec, count: int) -> list[FakeLink]:
    return [
        FakeLink(Info({layer: tuple(range(i, spec.num_experts, count)) for layer in spec.moe_layers})) for i in range(count)
    ]


def table(spec: ModelSpec, links: list[FakeLink]) -> Workers:
    by_address = {f"w{i}:1": link for i, link in enumerate(links)}
    workers = Workers(spec, list(by_address), by_address.__getitem__)  # type: ignore[arg-type]
    workers.wait_complete(240.0)
    return workers


def batch(tokens: int) -> StepBatch:
    empty = torch.empty(0, dtype=torch.int64)
    return StepBatch(7, tokens, tokens, empty, empty, empty, empty, [], (), empty)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_every_pair_is_computed_once_and_padding_never_leaves(spec: ModelSpec, count: int, tokens: int) -> None:
    links = shards(spec, count)
    dispatch = Dispatch(table(spec, links), timeout_s=1.0)
    torch.manual_seed(tokens)
    ids = torch.stack([torch.randperm(spec.num_experts)[:3] for _ in range(tokens + 2)])
    weights = torch.rand(tokens + 2, 3)
    out, stamps = torch.zeros(tokens + 2, spec.hidden_size), StepRing(2, spec.layers, count).begin(7, 0)
    dispatch.send(batch(tokens), LAYER, torch.randn(tokens + 2, spec.hidden_size), ids, weights)
    dispatch.add(out, LAYER, stamps)
    expected = (weights * (ids + 1)).sum(-1)[:tokens]
    torch.testing.assert_close(out[:tokens, 0], expected)
    assert not out[tokens:].any()
    for link in links:
        for call in link.calls:
            assert len(call.x) == len(np.unique(call.pair_row)), "only rows with an expert here are sent"
            assert set(call.pair_expert.tolist()) <= set(link.info.layers[LAYER])


def test_a_worker_without_rows_is_not_called(spec: ModelSpec) -> None:
    links = shards(spec, 2)
    dispatch = Dispatch(table(spec, links), timeout_s=1.0)
    x, ids = torch.randn(1, spec.hidden_size), torch.tensor([[0, 2]])
    dispatch.send(batch(1), LAYER, x, ids, torch.ones(1, 2))
    dispatch.add(torch.zeros_like(x), LAYER, StepRing(2, spec.layers, 2).begin(7, 0))
    assert (len(links[0].calls), len(links[1].calls)) == (1, 0)


@pytest.mark.parametrize("where", ["submit", "collect"])
def test_a_lost_worker_leaves_the_other_links_clean(spec: ModelSpec, where: str) -> None:
    links = shards(spec, 3)
    workers = table(spec, links)
    dispatch = Dispatch(workers, timeout_s=1.0)
    links[1].die_on = where
    x, ids = torch.randn(2, spec.hidden_size), torch.tensor([[0, 1, 2], [3, 4, 5]])
    stamps = StepRing(2, spec.layers, 3).begin(7, 0)
    with pytest.raises(LinkDown, match="w1:1: gone") as caught:  # noqa: PT012
        dispatch.send(batch(2), LAYER, x, ids, torch.ones(2, 3))
        dispatch.add(torch.zeros_like(x), LAYER, stamps)
    assert caught.value.worker == 1
    assert links[1].closed
    assert not workers.complete
    assert [link.open_calls for link in (links[0], links[2])] == [0, 0]
    links[1].die_on, links[1].open_calls = "", 0
    workers.wait_complete(240.0)  # the same address answers again: the step can be run again
    out = torch.zeros_like(x)
    dispatch.send(batch(2), LAYER, x, ids, torch.ones(2, 3))
    dispatch.add(out, LAYER, stamps)
    assert out[:, 0].tolist() == [6.0, 15.0]
    assert workers.rows[1].reconnects == 1
    workers.close()


def test_what_a_defect_left_with_the_workers_is_taken_back_by_the_next_step(spec: ModelSpec) -> None:
    """Memory that runs out between `send` and `add`, say: no link may be left with a call that nobody collects."""
    links = shards(spec, 2)
    dispatch = Dispatch(table(spec, links), timeout_s=1.0)
    x, ids, stamps = torch.randn(2, spec.hidden_size), torch.tensor([[0, 1], [2, 3]]), StepRing(2, spec.layers, 2).begin(7, 0)
    dispatch.begin()
    dispatch.send(batch(2), LAYER, x, ids, torch.ones(2, 2))  # and here the step raises
    dispatch.begin()
    assert [link.open_calls for link in links] == [0, 0]
    out = torch.zeros_like(x)
    dispatch.send(batch(2), LAYER, x, ids, torch.ones(2, 2))
    dispatch.add(out, LAYER, stamps)
    assert out[:, 0].tolist() == [3.0, 7.0]


@pytest.mark.parametrize("fault", ["", "die", "refuse"])
def test_two_halves_are_taken_back_in_their_order(spec: ModelSpec, fault: str) -> None:
    links = shards(spec, 2)
    for link in links:
        link.most = 2
    workers = table(spec, links)
    dispatch = Dispatch(workers, timeout_s=1.0)
    halves = [(torch.tensor([[0, 1]]), 1), (torch.tensor([[2, 3], [3, 4]]), 2)]
    outs, stamps = [torch.zeros(count, spec.hidden_size) for _, count in halves], StepRing(2, spec.layers, 2).begin(7, 0)
    for ids, count in halves:
        dispatch.send(batch(count), LAYER, torch.ones(count, spec.hidden_size), ids, torch.ones(count, 2))
    assert [link.open_calls for link in links] == [2, 2]
    if fault:
        links[1].die_on, links[1].refuse = ("collect", False) if fault == "die" else ("", True)
        with pytest.raises(LinkDown if fault == "die" else Mismatch):
            dispatch.add(outs[0], LAYER, stamps)
        assert links[0].open_calls == 0, "nothing is left on the other link"
        if fault == "die":
            links[1].die_on, links[1].open_calls = "", 0
        links[1].refuse = False
        assert links[1].open_calls == 0
        workers.wait_complete(240.0)
        outs = [torch.zeros_like(out) for out in outs]
        for ids, count in halves:
            dispatch.send(batch(count), LAYER, torch.ones(count, spec.hidden_size), ids, torch.ones(count, 2))
    for out in outs:
        dispatch.add(out, LAYER, stamps)
    assert [out[:, 0].tolist() for out in outs] == [[3.0], [7.0, 9.0]]
    workers.close()


def test_waiting_for_workers_ends_with_the_reason(spec: ModelSpec) -> None:
    asked: list[str] = []

    def refuse(address: str) -> FakeLink:
        asked.append(address)
        raise Unavailable("connection refused")

    workers = Workers(spec, ["w0:1"], refuse)  # type: ignore[arg-type]
    until(lambda: len(asked) > 1)
    with pytest.raises(Unavailable, match="w0:1: connection refused"):
        workers.wait_complete(0.2)
    workers.close()


def test_a_worker_that_can_never_fit_is_told_at_once(spec: ModelSpec) -> None:
    def mismatch(address: str) -> FakeLink:
        raise Mismatch("it serves another model")

    workers = Workers(spec, ["w0:1"], mismatch)  # type: ignore[arg-type]
    with pytest.raises(Mismatch, match="another model"):
        workers.wait_complete(240.0)
    workers.close()


def test_replicas_share_the_rows_of_a_step_and_always_alike(spec: ModelSpec) -> None:
    """Expert 1 on three workers, expert 2 on two, the others on one each."""
    held = [(0, 1, 2), (1, 2, 3, 4), (1, 5, 6, 7)]
    links = [FakeLink(Info(dict.fromkeys(spec.moe_layers, experts))) for experts in held]
    workers = table(spec, links)
    dispatch = Dispatch(workers, timeout_s=1.0)
    ids = torch.tensor([[1, 2, 5]]).repeat(12, 1)
    weights = torch.rand(12, 3)
    outs = []
    for _ in range(2):
        out = torch.zeros(12, spec.hidden_size)
        dispatch.begin()
        dispatch.send(batch(12), LAYER, torch.ones(12, spec.hidden_size), ids, weights)
        dispatch.add(out, LAYER, StepRing(1, spec.layers, 3).begin(7, 0))
        dispatch.commit()
        outs.append(out)
    expected = (weights * (ids + 1)).sum(1)
    torch.testing.assert_close(outs[0], expected[:, None].expand_as(outs[0]))
    assert torch.equal(outs[0], outs[1])
    pairs = [[call.pair_expert.tolist() for call in link.calls] for link in links]
    assert [each[0] for each in pairs] == [each[1] for each in pairs], "the same rows to the same worker"
    assert [each[0].count(1) for each in pairs] == [4, 4, 4]
    assert [each[0].count(2) for each in pairs] == [6, 6, 0]
    assert workers.load[LAYER].tolist() == [0, 24, 24, 0, 0, 24, 0, 0]
    assert workers.load.sum() == 72


def test_a_lost_replica_costs_no_expert(spec: ModelSpec) -> None:
    everything = tuple(range(spec.num_experts))
    links = [FakeLink(Info(dict.fromkeys(spec.moe_layers, everything))) for _ in range(2)]
    workers = table(spec, links)
    dispatch = Dispatch(workers, timeout_s=1.0)
    links[0].die_on = "submit"
    x, ids, weights = torch.ones(4, spec.hidden_size), torch.tensor([[0, 1]] * 4), torch.ones(4, 2)
    dispatch.begin()
    with pytest.raises(LinkDown):
        dispatch.send(batch(4), LAYER, x, ids, weights)
    assert workers.complete, "the other one holds everything"
    out = torch.zeros_like(x)
    dispatch.begin()
    dispatch.send(batch(4), LAYER, x, ids, weights)
    dispatch.add(out, LAYER, StepRing(1, spec.layers, 2).begin(7, 0))
    assert torch.equal(out, torch.full_like(x, 3.0))
    assert workers.load.sum() == 0
    dispatch.commit()
    assert workers.load[LAYER].tolist() == [4, 4, 0, 0, 0, 0, 0, 0], "the step that broke off counts nothing"
    workers.close()
