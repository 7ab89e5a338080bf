"""Hints inside a step: nothing they do shows in logits or in committed K and V; what they name is counted right.

The trunk and the worker core are real and in this process; what makes hints is replaced where a test wants it wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from reference_model import CASES
from torch import Tensor
from trunk_rig import PAGE, Rig
from wrong_heads import Constant, Failing, Shuffled

from expert_worker import client
from forefetch.errors import LinkDown
from forefetch.hints import FIRST, REFINED, ExpertHint
from forefetch.telemetry.hints import layer_hints
from forefetch.telemetry.ring import StepRing, StepStamps
from forefetch.wire import LayerCall, LayerReply
from router_service import forecast
from router_service.batch import StepBatch
from router_service.dispatch import Dispatch
from router_service.hints import MOST_FAILURES, Heads, Hints
from router_service.lookahead.estimate import Estimator
from router_service.lookahead.heads import Hint, Lookahead
from router_service.scheduler import Request
from router_service.trunk import Attend
from router_service.workers import Workers

CASE = "qwen3-dense-first"  # a dense layer in front and between: 5 layers, routed experts in 1 and 3
DEEP = "qwen3"  # 3 layers, all with routed experts
PROMPTS = (7, 3, 12)
TOKENS = 12


class Spy(client.Link):
    """A local link that keeps what it is told."""

    kind = "local"

    def __init__(self, inner: client.Link) -> None:
        super().__init__(inner.address, inner.info)
        self.inner, self.hints, self.calls = inner, list[ExpertHint](), list[tuple[int, int, frozenset[int]]]()

    def submit(self, call: LayerCall) -> None:
        self.calls.append((call.step, call.layer, frozenset(call.pair_expert.tolist())))
        self.inner.submit(call)

    def collect(self, timeout_s: float) -> LayerReply:
        return self.inner.collect(timeout_s)

    def hint(self, hint: ExpertHint) -> None:
        assert not hint.flaw
        self.hints.append(hint)
        self.inner.hint(hint)

    @property
    def hints_dropped(self) -> int:
        return self.inner.hints_dropped

    @property
    def alive(self) -> bool:
        return self.inner.alive

    def close(self) -> None: ...


@dataclass
class World:
    """A rig whose experts are workers, two shards unless told otherwise."""

    rig: Rig
    dispatch: Dispatch
    links: list[Spy]
    requests: list[Request] = field(default_factory=list)
    pages: list[tuple[int, ...]] = field(default_factory=list)  # of the requests, while they had some

    def hints(self, heads: Heads, setting: str) -> Hints:
        self.rig.hints = Hints(heads, self.dispatch, setting=setting, trained=False)
        return self.rig.hints

    def answer(self) -> tuple[list[list[int]], list[Tensor]]:
        """Tokens of all requests, and logits of all steps."""
        self.requests = [self.rig.add(CASES[DEEP].prompt[:n], TOKENS) for n in PROMPTS]
        self.pages = [request.pages for request in self.requests]
        logits = []
        while (found := self.rig.step()) is not None:
            logits.append(found)
        return [request.tokens for request in self.requests], logits

    def tier0(self) -> Lookahead:
        return Lookahead(self.rig.trunk, Estimator(self.rig.trunk, {}), {})


@pytest.fixture
def world(checkpoint: Callable[[str], Path]) -> Iterator[Callable[..., World]]:
    opened: list[Workers] = []

    def make(case: str = DEEP, slots: str = "100%", shards: int = 2, max_step_tokens: int = 9, on: str = "cpu") -> World:
        rig, folder = Rig(checkpoint(case), max_step_tokens=max_step_tokens, on=on), checkpoint(case)
        links = [
            Spy(client.local(client.ExpertConfig(model=str(folder), device=on, shard=i, shards=shards, slots=slots)))
            for i in range(shards)
        ]
        table = Workers(
            rig.spec, [f"w{i}:1" for i in range(shards)], lambda address: links[int(address[1 : address.index(":")])]
        )
        table.wait_complete(240.0)
        opened.append(table)
        dispatch = Dispatch(table, 5.0)
        rig.experts, rig.ring = dispatch, StepRing(4, rig.spec.layers, shards)
        return World(rig, dispatch, links)

    yield make
    for table in opened:
        table.close()


def predictors(world: World) -> dict[str, Heads]:
    real, experts = world.tier0(), world.rig.spec.num_experts
    return {
        "own gates": real,
        "shuffled": Shuffled(real, experts),
        "constant": Constant(real.targets, (0, 1, 2, 3), 0.9),
        "certain": Constant(real.targets, tuple(range(experts)), 1.0),
        "NaN": Constant(real.targets, (0, 1), float("nan")),
        "infinite": Constant(real.targets, (5, 2), float("inf")),
        "no such expert": Constant(real.targets, (-1, experts, 2**31), 0.9),
        "failing": Failing(real),
    }


@pytest.mark.parametrize(("case", "slots"), [(CASE, "100%"), (DEEP, "3")])
def test_no_predictor_in_any_mode_changes_a_bit(world: Callable[..., World], case: str, slots: str) -> None:
    plain = world(case, slots)
    tokens, logits = plain.answer()
    kv = [pool.clone() for pool in (*plain.rig.trunk.cache.k, *plain.rig.trunk.cache.v)]
    walking = ("own gates", "shuffled", "failing")  # the others do not look at what the attention ahead gives
    for mode, name in [("plain", name) for name in predictors(plain)] + [("attention", name) for name in walking]:
        other = world(case, slots)
        hints = other.hints(predictors(other)[name], mode)
        found, others = other.answer()
        assert found == tokens, (mode, name)
        assert all(torch.equal(a, b) for a, b in zip(logits, others, strict=True)), (mode, name)
        pools = (*other.rig.trunk.cache.k, *other.rig.trunk.cache.v)
        assert all(same_committed(other, a, b) for a, b in zip(kv, pools, strict=True)), (mode, name)
        assert (hints.failures > 0) == (name == "failing")
        assert (hints.sent > 0) == (name not in ("failing", "NaN", "no such expert"))


def same_committed(world: World, before: Tensor, after: Tensor) -> bool:
    """Whether two pools [Hkv, pages, page, D] agree in all that requests committed, to the bit."""
    for request, owned in zip(world.requests, world.pages, strict=True):
        positions = torch.arange(request.computed)
        pages = torch.tensor(owned)[positions // PAGE]
        if not torch.equal(before[:, pages, positions % PAGE], after[:, pages, positions % PAGE]):
            return False
    return True


@pytest.mark.parametrize("breaks_at", range(3))
def test_a_step_that_breaks_off_behind_hints_is_replayed_to_the_bit(world: Callable[..., World], breaks_at: int) -> None:
    """The attention ahead has written K and V of later layers by then; the replay must not see any of it."""
    tokens, logits = world().answer()
    broken = world()
    broken.hints(broken.tier0(), "attention")
    add, left = broken.dispatch.add, [3, 1, 4]

    def breaking(out: Tensor, layer: int, stamps: StepStamps) -> int:
        busy = add(out, layer, stamps)
        if layer == breaks_at and left and broken.rig.steps == left[-1]:
            left.pop()
            raise LinkDown(0, "gone")
        return busy

    broken.dispatch.add = breaking  # type: ignore[method-assign]
    broken.requests = [broken.rig.add(CASES[DEEP].prompt[:n], TOKENS) for n in PROMPTS]
    found = []
    while True:
        try:
            step = broken.rig.step()
        except LinkDown:
            continue  # nothing was committed: the same rows are planned again
        if step is None:
            break
        found.append(step)
    assert len(left) < 3
    assert [request.tokens for request in broken.requests] == tokens
    assert all(torch.equal(a, b) for a, b in zip(logits, found, strict=True))


def test_pages_of_a_cancelled_request_carry_nothing_over(world: Callable[..., World]) -> None:
    """Estimates of a step are left in the pages of a request that is cancelled; the next owner must not read them."""
    clean = world()
    clean.requests = [clean.rig.add(CASES[DEEP].prompt[:5], TOKENS)]
    expected = list(iter(clean.rig.step, None))
    dirty = world()
    dirty.hints(Failing(dirty.tier0()), "attention")
    gone = dirty.rig.add(CASES[DEEP].prompt[:13], 20)
    before = gone.pages
    for _ in range(4):
        dirty.rig.step()
    dirty.rig.scheduler.remove(gone, 0.0)
    again = dirty.rig.add(CASES[DEEP].prompt[:5], TOKENS)
    assert again.pages[0] in before
    found = list(iter(dirty.rig.step, None))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("mode", ["plain", "attention"])
def test_what_is_named_is_counted_against_what_workers_were_asked_for(world: Callable[..., World], mode: str) -> None:
    """Brute force over the frames and hints that the links saw."""
    at = world()
    hints = at.hints(at.tier0(), mode)
    at.answer()
    assert hints.sent == sum(len(link.hints) for link in at.links)
    named: dict[tuple[int, int], dict[tuple[int, bool], set[int]]] = {}
    for hint in (hint for link in at.links for hint in link.hints):
        kind = (hint.source, hint.phase == REFINED)
        named.setdefault((hint.step, hint.layer), {}).setdefault(kind, set()).update(hint.experts.tolist())
    chosen: dict[tuple[int, int], set[int]] = {}
    for step, layer, experts in (call for link in at.links for call in link.calls):
        chosen.setdefault((step, layer), set()).update(experts)
    for count in layer_hints(at.rig.ring, at.rig.spec.moe_layers):
        keys = [key for key in named if key[1] == count.layer]
        union = {key: set().union(*named[key].values()) for key in keys}
        assert count.chosen == sum(len(chosen[key]) for key in keys)
        assert count.all.named == sum(map(len, union.values()))
        assert count.all.found == sum(len(union[key] & chosen[key]) for key in keys)
        for kind, what in ((count.next, (count.layer - 1, False)), (count.second, (count.layer - 2, False))):
            assert kind.named == sum(len(named[key].get(what, ())) for key in keys)
            assert kind.found == sum(len(named[key].get(what, set()) & chosen[key]) for key in keys)
        assert count.refined.named == sum(len(named[key].get((count.layer - 1, True), ())) for key in keys)
        assert count.hits + count.late + count.misses + count.resident == sum(
            len(experts) for link in at.links for _, layer, experts in link.calls if layer == count.layer
        )
        assert (count.all.found > 0) == (count.layer > 0)


def test_each_worker_hears_of_its_own_experts_likeliest_first(world: Callable[..., World]) -> None:
    at = world(shards=3)
    at.hints(at.tier0(), "attention")
    at.answer()
    for link in at.links:
        held = set(link.info.layers[1])
        assert link.hints
        for hint in link.hints:
            assert set(hint.experts.tolist()) <= held
            assert (np.diff(hint.probabilities) <= 0).all()
            assert (hint.probabilities >= np.float32(forecast.FLOOR)).all()
            assert hint.layer > hint.source
            assert hint.layer - hint.source <= 2
            assert hint.phase == FIRST or hint.layer == hint.source + 1
    assert any(hint.window_ns > 0 for link in at.links for hint in link.hints)


def test_heads_run_by_themselves_only_where_experts_are_copied(world: Callable[..., World]) -> None:
    full, few = world(), world(slots="3")
    for at, copies in ((full, False), (few, True)):
        hints = at.hints(at.tier0(), "auto")
        modes = []
        learn = hints.learn
        hints.learn = lambda timings, learn=learn, hints=hints, modes=modes: (modes.append(hints.mode), learn(timings))  # type: ignore[method-assign]
        at.requests = [at.rig.add(CASES[DEEP].prompt[:5], 60)]
        at.rig.run()
        assert set(modes) == ({"off", "plain", "attention"} if copies else {"off"}), "all are tried"
        assert (hints.sent > 0) is copies
    few.dispatch.workers.lost(0, "gone")
    few.dispatch.workers.lost(1, "gone")
    assert hints.mode == "off"  # what comes back may hold everything


def test_heads_that_keep_failing_are_switched_off(world: Callable[..., World], caplog: pytest.LogCaptureFixture) -> None:
    at = world()
    hints = at.hints(Failing(at.tier0()), "plain")
    at.answer()
    assert hints.failures == MOST_FAILURES
    assert hints.mode == "off"
    assert "heads are broken" in caplog.text


def test_long_prompts_are_looked_at_in_part(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router_service.hints.looked_at", lambda decodes, tokens: forecast.looked_at(decodes, tokens, 4))
    at = world(max_step_tokens=20)
    seen: list[tuple[int, bool]] = []
    real = at.tier0()

    class Counting(Constant):
        def predict(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, attend: Attend | None = None) -> list[Hint]:
            assert len(x) == len(ids) == len(weights)
            seen.append((len(x), attend is not None))
            return real.predict(layer, x, ids, weights, attend)

    at.hints(Counting(real.targets, (0,), 0.5), "attention")
    at.answer()
    assert (4, False) in seen, "rows of a prompt, without attention"
    assert {rows for rows, attended in seen if attended} <= set(range(1, len(PROMPTS) + 1))
    assert any(attended for _, attended in seen)
    assert max(rows for rows, _ in seen) == 4


def test_a_padded_step_names_for_its_real_rows_only(world: Callable[..., World]) -> None:
    at = world()
    hints = at.hints(Constant({0: (1,), 1: (2,), 2: ()}, (1, 2), 0.5), "plain")
    empty = torch.empty(0, dtype=torch.int64)
    batch = StepBatch(3, 2, 2, empty, empty, empty, empty, [], (), empty)
    observer = hints.begin(batch, at.rig.ring.begin(3, 0))
    assert observer is hints
    x, ids = torch.zeros(8, at.rig.spec.hidden_size), torch.zeros(8, 2, dtype=torch.int64)
    hints.chosen(0, x, ids, torch.ones(8, 2), lambda layer, estimate: estimate)
    found = [hint for link in at.links for hint in link.hints]
    assert found
    for hint in found:
        np.testing.assert_allclose(hint.probabilities, 0.75, err_msg="two rows, not eight")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["plain", "attention"])
def test_on_a_gpu_hints_leave_without_the_step_and_change_no_token(world: Callable[..., World], mode: str) -> None:
    expected = world(slots="4", on="cuda").answer()[0]
    at = world(slots="4", on="cuda")
    hints = at.hints(at.tier0(), mode)
    assert at.answer()[0] == expected
    hints.close()
    assert hints.failures == 0
    assert hints.sent > 0
    assert sum(layer.all.found for layer in layer_hints(at.rig.ring, at.rig.spec.moe_layers)) > 0
