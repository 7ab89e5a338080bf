"""Experts in few slots, moved by the device, against all of them resident: Triton's interpreter stands in for the GPU."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from expert_worker import client as expert
from expert_worker.config import ExpertConfig
from expert_worker.core import Core
from expert_worker.experts import Storage
from expert_worker.in_place import InPlaceExperts
from expert_worker.links import LocalLink
from expert_worker.loading import Loader
from expert_worker.packed import PackedExperts, packed_format
from forefetch.hints import ExpertHint
from forefetch.kernels import residency
from forefetch.kernels.grouped_mlp.formats import ExpertFormat
from forefetch.p2p.lane import TOLD_WORDS
from forefetch.synthetic import open_model
from forefetch.wire import LayerCall, Verified
from router_service.captured import CudaRecorder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = "layers=3,hidden_size=64,moe_intermediate_size=32,experts=8,num_experts_per_tok=2,vocab_size=64"
PLACE: dict[str, Any] = {"device": DEVICE, "dtype": torch.float32, "max_rows": 16}


def make(kind: Any, slots: int, held: tuple[int, ...] = tuple(range(8))) -> tuple[PackedExperts, InPlaceExperts]:
    spec, checkpoint = open_model(f"synthetic:qwen3-30b-a3b,{SMALL}", allow_synthetic=True)
    format = ExpertFormat(kind)
    whole = PackedExperts(spec, checkpoint, held, format, **PLACE)
    few = InPlaceExperts(spec, checkpoint, held, format, slots=slots, **PLACE)
    empty(few)
    return whole, few


def empty(few: InPlaceExperts) -> None:
    """No expert is in a slot, and slots hold what is NaN in every float type."""
    few.state.slots.fill_(255)
    few.state.table.copy_(few.state.home)
    few.state.expert_in.fill_(-1)


def settled() -> None:
    """Nothing is under way."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def oracle(few: InPlaceExperts, logits: list[Tensor], recall: float, draw: random.Random) -> Any:
    """Heads that name the next two layers' choice, each with a chance."""

    def ahead(layer: int, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor] | None:
        targets = logits[layer + 1 : layer + 3]
        if not targets:
            return None
        experts = torch.stack([target.topk(2, dim=1).indices for target in targets])
        chances = torch.full(experts.shape, 0.9, device=DEVICE)
        chances[torch.tensor([[[draw.random() > recall for _ in row] for row in t] for t in experts.tolist()])] = 0.0
        return experts, chances

    return ahead


@pytest.mark.parametrize(("kind", "slots"), [("float32", 2), ("int4", 11)])
def test_where_an_expert_lies_changes_no_bit(kind: str, slots: int) -> None:
    """Steps with right and wrong predictions, of one row and of several, over slots full of NaN."""
    whole, few = make(kind, slots)
    draw, numbers = random.Random(slots), torch.Generator().manual_seed(slots)
    for _ in range(3):
        rows = draw.choice((1, 1, 6))
        x = torch.randn(rows, 64, generator=numbers).to(DEVICE)
        logits = [torch.randn(rows, 8, generator=numbers).to(DEVICE) for _ in range(3)]
        few.ahead = oracle(few, logits, draw.choice((0.0, 0.5, 1.0)), draw)
        for layer in range(3):
            expected = whole.route(layer, x, logits[layer]).clone()
            assert torch.equal(few.route(layer, x, logits[layer]), expected)
        few.settle(torch.zeros(rows, 1, dtype=torch.bool, device=DEVICE))
        whole.settle(torch.zeros(rows, 1, dtype=torch.bool, device=DEVICE))
        holds_what_it_says(few)
    found = few.verified(few.counters.cpu())
    assert found.copied_bytes > 0
    assert found.hits > 0
    assert found.misses > 0
    assert few.load.tolist() == whole.load.tolist()


def holds_what_it_says(few: InPlaceExperts) -> None:
    """Table, slots and their contents agree."""
    state = few.state
    for slot, number in enumerate(state.expert_in.tolist()):
        if number >= 0:
            assert int(state.table[number]) == state.first_slot + slot
            assert torch.equal(state.slots[slot].cpu(), state.host[int(state.home[number]) - state.first_host])
    rows = state.table.cpu()
    assert int(((rows >= state.first_slot) & (rows < state.first_slot + len(state.slots))).sum()) == int(
        (state.expert_in >= 0).sum()
    )
    assert not state.coming.any()


def test_calls_and_hints_over_a_wire() -> None:
    """A shard with half of the experts; a hint brings what the next call finds."""
    held = (1, 3, 4, 6)
    whole, few = make("int8", 3, held)
    for step in range(2):
        call = LayerCall(
            step,
            1,
            torch.randn(1, 64),
            np.zeros(2, np.int32),
            np.array([3, 6], np.int32),
            np.random.rand(2).astype(np.float32),
        )
        named = np.array([3, 6], dtype=np.int32)
        assert few.hint(ExpertHint(step, 0, 1, 0, named, np.array([0.9, 0.8], np.float32), 10**6))
        expected, out = torch.empty_like(call.x), torch.full_like(call.x, torch.nan)
        whole.forward(call, expected)
        stall, found = few.forward(call, out)
        assert torch.equal(out, expected)
        assert (stall, found.hits, found.misses) == (0, 2, 0)
    assert few.resident(1) == [3, 6]
    assert not few.hint(ExpertHint(0, 0, 1, 0, np.array([2], np.int32), np.ones(1, np.float32), 1))


def test_a_copy_that_never_comes_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted stall: experts were promised, and whoever should bring them is gone. The layer reads them in place."""
    whole, few = make("float32", 4)
    few.state.coming.fill_(1)
    monkeypatch.setattr(residency.launches, "PATIENCE", 5)
    monkeypatch.setattr(residency, "bring", lambda state, now: None)
    x, logits = torch.randn(1, 64).to(DEVICE), torch.randn(1, 8).to(DEVICE)
    assert torch.equal(few.route(0, x, logits), whole.route(0, x, logits))
    assert int(few.state.counters[residency.COUNTERS.index("waits")]) == 5


def test_a_layer_at_work_keeps_its_experts() -> None:
    """The only victims belong to the layer whose kernels may be reading them: nobody comes in."""
    _, few = make("float32", 2)
    state = few.state
    for slot, number in enumerate((8, 9)):  # of layer 1
        state.expert_in[slot], state.table[number] = number, state.first_slot + slot
    state.chance[10] = 0.99
    state.active.fill_(1)  # the layers got there before the copies
    residency.spare(state, 0)
    residency.pick(state, 0, 1)
    assert state.jobs[0].tolist() == [[-1, -1]] * 2
    assert state.table[8:10].tolist() == [state.first_slot, state.first_slot + 1]
    state.active.fill_(0)
    residency.spare(state, 0)
    residency.pick(state, 0, 1)
    assert state.jobs[0, 0, 0] == 10
    assert few.resident(1) in ([0], [1])


CHOICES = [
    *((24, "in-place", True, "PackedExperts"), (12, "in-place", False, "InPlaceExperts")),
    *((12, "auto", True, "InPlaceExperts"), (12, "auto", False, "SlottedExperts")),
    *((12, "wait", True, "SlottedExperts"), (12, "shadow", True, "ShadowedInPlace")),
]


@pytest.mark.parametrize(("slots", "miss", "local", "kind"), CHOICES)
def test_settings_choose_it_where_slots_are_fewer(slots: int, miss: str, local: bool, kind: str) -> None:
    """On a GPU; the loader's GPU half runs on a CPU just as well. `local`: in a router's process."""
    model = {"model": f"synthetic:qwen3-30b-a3b,{SMALL}", "allow_synthetic": True, "device": "cpu", "experts": "int8"}
    loader = Loader(ExpertConfig(**model, miss=miss), local=local)  # type: ignore[arg-type]
    how = {"device": DEVICE, "dtype": torch.float32, "on_progress": lambda done, total: None}
    experts = loader._on_gpu(loader.held(0), Storage(slots, max_rows=4, miss=miss), how)
    assert type(experts).__name__ == kind
    link = LocalLink(Core(replace(loader.info, device="cuda"), experts))
    assert (expert.resident_of(link) is experts) == (kind != "SlottedExperts")


def test_heads_may_say_anything() -> None:
    _, few = make("float32", 4)
    experts = torch.tensor([[[0, 99, -5, 2], [0, 3, 3, 1]]], device=DEVICE)
    chances = torch.tensor([[[0.5, 0.9, 0.9, float("nan")], [0.5, 1.0, 2.0, -1.0]]], device=DEVICE)
    residency.note(few.state, 1, experts, chances)
    found = few.state.chance[8:16].tolist()
    assert found[0] == pytest.approx(0.75, abs=1e-5)
    assert found[3] == pytest.approx(1.0, abs=1e-5)
    assert [found[e] for e in (1, 2, 4, 5, 6, 7)] == [0.0] * 6


def test_calls_of_lanes_are_those_of_resident_experts_and_tell_what_they_found() -> None:
    """Two lanes, hints of one's router, and a call over another link: every bit, and every count at whom it belongs to."""
    whole, few = make("float32", 6)
    shares = [few.share(4, "a"), few.share(4, "b")]
    numbers = torch.Generator().manual_seed(7)
    told = [torch.zeros(TOLD_WORDS, dtype=torch.int64, device=DEVICE) for _ in shares]
    for number in range(12):
        layer, share = number % 3, shares[number // 3 % 2]
        x = torch.randn(3, 64, generator=numbers).to(DEVICE)
        ids = torch.rand(3, 8, generator=numbers).topk(2).indices.int().to(DEVICE)
        ids[2] = -1
        weights, out = torch.rand(3, 2, generator=numbers).to(DEVICE), torch.empty(3, 64, device=DEVICE)
        few.evaluate(layer, x, ids, weights, out, share)
        few.join(share)
        assert torch.equal(out, whole.run(layer, x, ids, weights)), number
    for share, words in zip(shares, told, strict=True):
        few.tell(share, words)
    found = [Verified(*words.tolist()) for words in told]
    assert all(sum(one[:4]) > 0 for one in found)
    assert few.copied.bytes == sum(one.copied_bytes for one in found) > 0
    assert few.verified(few.counters.cpu()) == Verified(), "no call over another link has found anything"
    before = found[1].copied_bytes
    few.state.chance.zero_()
    settled()  # hints have a stream of their own, which waits for nobody
    absent = next(e for e in range(8) if e not in few.resident(2))
    few.hint(ExpertHint(5, 1, 2, 0, np.array([absent], np.int32), np.array([0.95], np.float32), 0), "b")
    settled()
    few.tell(shares[1], told[1])
    assert absent in few.resident(2)
    assert Verified(*told[1].tolist()).copied_bytes - before == few.expert_bytes, "a hint's copy counts for its router"
    for share in shares:
        few.leave(share)
    assert few.copied.bytes == sum(Verified(*words.tolist()).copied_bytes for words in told)


def test_a_call_behind_a_fault_touches_nothing() -> None:
    """Its lane may not hold the device's lock, and another's layer may be at work."""
    _, few = make("float32", 6)
    share = few.share(4)
    share.fault = torch.ones(1, dtype=torch.int32, device=DEVICE)
    few.state.active.fill_(2)
    ids = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
    x, weights = torch.randn(1, 64, device=DEVICE), torch.ones(1, 2, device=DEVICE)
    few.evaluate(0, x, ids, weights, torch.empty_like(x), share)
    assert int(few.state.active) == 2
    assert not share.counters[:4].any()


LARGER = "layers=6,hidden_size=256,moe_intermediate_size=128,experts=32,num_experts_per_tok=4,vocab_size=64"


class Moving:
    """A recorded step of 6 layers, in each a while for attention; 48 slots for 192 experts."""

    def __init__(self, kind: Any, rows: int) -> None:
        spec, checkpoint = open_model(f"synthetic:qwen3-30b-a3b,{LARGER}", allow_synthetic=True)
        place: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16, "max_rows": rows}
        format = packed_format(spec, kind, torch.bfloat16, DEVICE)
        self.whole = PackedExperts(spec, checkpoint, tuple(range(32)), format, **place)
        self.few = InPlaceExperts(spec, checkpoint, tuple(range(32)), format, slots=48, **place)
        empty(self.few)
        self.x = torch.randn(rows, 256, device=DEVICE, dtype=torch.bfloat16)
        self.logits = torch.zeros(6, rows, 32, device=DEVICE, dtype=torch.bfloat16)
        self.named = torch.zeros(6, rows, 6, dtype=torch.int32, device=DEVICE)
        self.chances = torch.full((6, rows, 6), 0.8, device=DEVICE)
        self.out = torch.zeros(6, rows, 256, device=DEVICE, dtype=torch.bfloat16)
        self.idle = torch.zeros(rows, 1, dtype=torch.bool, device=DEVICE)
        self.few.ahead = self._ahead
        self.replay = CudaRecorder(DEVICE)(self._step)

    def _ahead(self, layer: int, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor] | None:
        ahead = slice(layer + 1, layer + 3)
        return (self.named[ahead], self.chances[ahead]) if layer < 5 else None

    def _step(self) -> None:
        self.few.begin(self.idle)
        for layer in range(6):
            torch.cuda._sleep(20_000)  # type: ignore[no-untyped-call]
            self.out[layer].copy_(self.few.route(layer, self.x, self.logits[layer]))
        self.few.settle(self.idle)

    def resident(self, layer: int) -> Tensor:
        """The same choice evaluated by experts that never move."""
        rows = len(self.x)
        return self.whole.run(layer, self.x, self.few._chosen[layer, :rows], self.few._weights[layer, :rows])

    def load(self) -> None:
        """Some of what was liked before, some of it new; every sixth name is wrong, at least."""
        self.logits.mul_(0.7).add_(torch.randn(self.logits.shape, device=DEVICE, dtype=torch.bfloat16))
        best = self.logits.topk(4, dim=2).indices
        self.named.copy_(torch.cat([best, torch.randint_like(best[..., :2], 32)], dim=2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 4, 24])
@pytest.mark.parametrize("kind", ["int4", "bfloat16"])
@torch.inference_mode()
def test_recorded_steps_while_experts_move(kind: str, rows: int) -> None:
    """Layers, choices and copies overlap on the device for hundreds of layers; not one bit of one layer may differ."""
    moving = Moving(kind, rows)
    for step in range(100):
        moving.load()
        moving.replay()
        for layer in range(6):
            assert torch.equal(moving.out[layer], moving.resident(layer)), (step, layer)
    torch.cuda.synchronize()
    holds_what_it_says(moving.few)
    found = moving.few.verified(moving.few.counters.cpu())
    assert found.copied_bytes > 0
    assert min(found.hits, found.late + found.misses) > 0


def test_layers_and_copies_in_three_processes() -> None:
    """With the check of `active` left out, or an expert published before its last byte, or without turns, this fails within 20
    layers."""
    script = Path(__file__).with_name("residency_race.py")
    ended = subprocess.run([sys.executable, str(script), "24"], capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
