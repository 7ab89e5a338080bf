"""Lanes between two GPUs: their rows against one GPU's, bit for bit where sums are ordered alike; then out of order, a worker
that stalls and one that is killed in a step. `pytest -m multigpu`, or `-m gpu`: where there is one GPU both sides share it, in
turns of some milliseconds, which changes no bit.

What is compared is what the head sees and what every gate saw, so that a step of 64 rows and one of 32 may be: cuBLAS cuts
the head's product by the number of rows. Here the head is the identity, whose sums are exact in any order.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forefetch.errors import LinkDown
from forefetch.hints import ExpertHint
from forefetch.wire import Verified

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ALONE = torch.cuda.device_count() < 2  # both sides on one GPU
MODEL, BATCH, CONTEXT, FEW = "synthetic:olmoe-1b-7b", 64, 256, 4
HALF = BATCH // 2
U, U32 = 2.0**-8, 2.0**-24
"""Unit roundoffs of bfloat16 and float32."""


class Here:
    """Experts on one GPU, evaluated as lanes evaluate them: each lane's pairs by their ids and weights, its sums rounded, and
    those added in the lanes' order. owners [L, E]: lanes by place of the layer."""

    def __init__(self, experts: Any, owners: Tensor, lanes: int) -> None:
        self._experts, self._owners, self._lanes = experts, owners, lanes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def settle(self, idle: Tensor) -> None:
        """`run` counts."""

    def chosen(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """ids, weights [T, K]."""
        from forefetch.kernels.gate.triton import choose_into

        spec = self._experts.spec
        ids = torch.empty(len(logits), spec.top_k, dtype=torch.int32, device=logits.device)
        weights = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
        choose_into(logits, ids, weights, spec.gate_rule, spec.renormalise)
        return ids, weights

    def parts(self, layer: int, x: Tensor, logits: Tensor) -> list[Tensor]:
        """What each lane answers [T, H]."""
        ids, weights = self.chosen(logits)
        owner = self._owners[self._experts.layers[layer]][ids.long()]
        return [self._experts.run(layer, x, ids.masked_fill(owner != lane, -1), weights).clone() for lane in range(self._lanes)]

    def route(self, layer: int, x: Tensor, logits: Tensor) -> Tensor:
        """See Resident."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for part in self.parts(layer, x, logits):
            total += part.float()
        return total.to(x.dtype)

    def unsummed(self, layer: int, x: Tensor, logits: Tensor) -> Tensor:
        """See Resident; what lanes bring is added up."""
        return self.route(layer, x, logits)


@dataclass
class Bench:
    """One rig and workers on the other GPU: with all experts, with the second half, and with slots for half of all. `gates`
    [L, rows, H]: what the last step's gates saw."""

    rig: Any
    processes: dict[str, Any]
    tables: dict[str, Any]
    gates: Tensor

    def step(self, model: Any, buffers: Any, rows: int) -> tuple[Tensor, Tensor]:
        """What the head sees [rows, H] and the gates saw [L, rows, H], of the first `rows` requests."""
        from benchmarks.p2p import logits_of

        out = logits_of(self.rig, model, buffers, rows, CONTEXT, number=1)
        return out, self.gates[:, :rows].clone()

    def here(self, rows: int, experts: Any = None) -> tuple[Tensor, Tensor]:
        """A step on one GPU."""
        return self.step(*self.recorded(rows, experts), rows)

    def recorded(self, rows: int, experts: Any = None) -> tuple[Any, Any]:
        """Recorded steps on one GPU, and their buffers."""
        from benchmarks.p2p import buffers_of
        from router_service.captured import CapturedTrunk

        buffers = buffers_of(rows, CONTEXT)
        model = CapturedTrunk(self.rig.trunk, experts or self.rig.experts, buffers)
        model.warm_up()
        return model, buffers

    def over(self, table: str, rows: int, parts: int = 1, patience_s: float = 5.0) -> tuple[Any, Any]:
        """Recorded steps over lanes, and their buffers."""
        from benchmarks.p2p import buffers_of, laned

        buffers = buffers_of(rows, CONTEXT)
        return laned(self.rig, self.tables[table], rows, parts, buffers, patience_s), buffers

    def lanes_of(self, table: str) -> Here:
        """The same division on one GPU."""
        workers, moe = self.tables[table], list(self.rig.spec.moe_layers)
        owners = torch.from_numpy(workers.owners[0][moe]).to(self.rig.device)
        return Here(self.rig.experts, owners, len(workers.rows))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    from benchmarks.p2p import prepared, table_of, worker_on

    other = "cuda:0" if ALONE else "cuda:1"
    slots = ["--slots=50%", "--miss=in-place", "--cache-dir=none"]
    with (
        worker_on(other, MODEL, "int4") as whole,
        worker_on(other, MODEL, "int4", spread=True) as half,
        worker_on(other, MODEL, "int4", more=slots) as few,
    ):
        rig = prepared(MODEL, "int4", "bfloat16", BATCH, CONTEXT)
        hidden, device = rig.spec.hidden_size, rig.device
        rig.trunk.head = torch.eye(hidden, dtype=rig.dtype, device=device)
        for process in (whole, half, few):
            process.wait_ready(120.0)
        tables = {"apart": table_of(rig, whole, "int4"), "spread": table_of(rig, half, "int4", spread=True)}
        tables["slots"] = table_of(rig, few, "int4")
        gates = torch.zeros(len(rig.spec.moe_layers), BATCH, hidden, dtype=rig.dtype, device=device)
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, gates)
            yield Bench(rig, {"apart": whole, "spread": half, "slots": few}, tables, gates)
        for table in tables.values():
            table.close()


def watch(patch: pytest.MonkeyPatch, gates: Tensor) -> None:
    """Steps that are recorded from now on leave there what their gates saw."""
    from expert_worker.packed import PackedExperts
    from router_service.p2p_decoder import LaneExperts

    send = LaneExperts.send

    def sent(self: Any, layer: int, first: int, x: Tensor, logits: Tensor) -> int:
        gates[layer, first : first + len(x)].copy_(x)
        return send(self, layer, first, x, logits)

    def seen(route: Callable[..., Any]) -> Callable[..., Any]:
        def routed(self: Any, layer: int, x: Tensor, logits: Tensor) -> Any:
            gates[layer, : len(x)].copy_(x)
            return route(self, layer, x, logits)

        return routed

    patch.setattr(LaneExperts, "send", sent)
    patch.setattr(PackedExperts, "route", seen(PackedExperts.route))
    patch.setattr(PackedExperts, "unsummed", seen(PackedExperts.unsummed))
    patch.setattr(Here, "route", seen(Here.route))


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], what: str) -> None:
    """Bit for bit. Says from which layer on it is not, and in how many rows."""
    rows = len(expected[0])
    apart = [int((a != b).any(1).sum()) for a, b in zip(found[1][:, :rows], expected[1], strict=True)]
    apart.append(int((found[0][:rows] != expected[0]).any(1).sum()))
    assert not any(apart), f"{what}: rows that differ at the gates, and behind them: {apart} of {rows}"


def distance(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> list[float]:
    """Relative, by layer and behind them: for people."""
    pairs = [*zip(found[1].float(), expected[1].float(), strict=True), (found[0].float(), expected[0].float())]
    return [round(float((a - b).norm() / b.norm()), 4) for a, b in pairs]


def test_experts_on_both_are_two_shares_on_one(bench: Bench) -> None:
    """Bit for bit; and a few rows, for which experts have another kernel."""
    here = bench.lanes_of("spread")
    for rows in (BATCH, FEW):
        model, buffers = bench.over("spread", rows)
        found = bench.step(model, buffers, rows)
        same(found, bench.here(rows, here), f"{rows} rows")
        model.close()
        if rows == BATCH:
            plain = bench.here(rows)
            few = bench.here(HALF)
            print("spread against one GPU, by layer:", distance(found, plain), flush=True)
            half = plain[0][:HALF], plain[1][:, :HALF]
            print("one GPU's 32 rows against its 64:", distance(few, half), flush=True)


@torch.inference_mode()
def test_two_shares_of_a_layer_are_the_whole_but_for_rounding(bench: Bench) -> None:
    """|two - one| <= u (|a| + |b| + |two| + |one|) + 2 K u32 sum |pairs|: a, b, their sum and the whole are each rounded once
    from float32, and float32 sums of K pairs are off by K roundings at most."""
    here, experts, spec = bench.lanes_of("spread"), bench.rig.experts, bench.rig.spec
    _, gates = bench.here(BATCH)
    for layer, x in zip(spec.moe_layers, gates, strict=True):
        logits = x @ bench.rig.trunk.layers[layer].gate.t()
        one, two = experts.route(layer, x, logits).float(), here.route(layer, x, logits).float()
        ids, weights = here.chosen(logits)
        lone = [ids.masked_fill(torch.arange(spec.top_k, device=ids.device) != k, -1) for k in range(spec.top_k)]
        terms = sum(experts.run(layer, x, k, weights).float().abs() for k in lone)
        sizes = sum(part.float().abs() for part in (*here.parts(layer, x, logits), one, two))
        bound = (1 + 2 * U) * (U * sizes + 2 * spec.top_k * U32 * terms)
        assert ((two - one).abs() <= bound).all(), f"layer {layer}"
        ids[:, -1] = -1
        lost = experts.run(layer, x, ids, weights).float()
        assert ((lost - one).abs() > bound).any(1).all(), "the bound would not see a lost pair"


def test_experts_apart_are_one_gpus(bench: Bench) -> None:
    """A whole batch, and a few rows, whose choice one GPU's kernel for so few makes itself."""
    for rows in (BATCH, FEW):
        expected = bench.here(rows)
        model, buffers = bench.over("apart", rows)
        same(bench.step(model, buffers, rows), expected, f"{rows} rows in one part")
        model.close()


def test_experts_that_come_and_go_are_those_that_stay(bench: Bench) -> None:
    """In slots for half of them, moved by the worker's GPU within its recorded step, and ahead of time by hints: every bit."""
    (worker,) = bench.tables["slots"].rows
    draw = np.random.default_rng(3)
    for rows, parts in ((BATCH, 1), (BATCH, 2), (FEW, 1)):
        model, buffers = bench.over("slots", rows, parts)
        plain, few = bench.recorded(rows // parts)
        expected = bench.step(plain, few, rows // parts)
        for _ in range(4):
            for layer in range(1, 6):
                named = draw.permutation(64)[:6].astype(np.int32)
                worker.link.hint(ExpertHint(1, layer - 1, layer, 0, named, np.full(6, 0.9, np.float32), 0))
            time.sleep(0.3)  # five layers of these shapes take less than a call: hints would find them over, and bring nothing
            same(bench.step(model, buffers, rows), expected, f"{rows} rows in {parts}")
        found = Verified(*model._lanes.told[0].tolist())
        print(f"{rows} rows in {parts}:", found, flush=True)
        assert min(found.hits + found.late, found.misses, found.resident, found.copied_bytes) > 0
        model.close()


def until(condition: Any, timeout: float = 20.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def test_halves_stalls_and_a_killed_worker(bench: Bench) -> None:
    """The last test: its worker is gone afterwards."""
    process, (plain, few) = bench.processes["apart"], bench.recorded(HALF)
    half = bench.step(plain, few, HALF)
    model, buffers = bench.over("apart", BATCH, parts=2, patience_s=1.0)

    def step() -> tuple[Tensor, Tensor]:
        return bench.step(model, buffers, BATCH)

    whole = step()
    same(whole, half, "a half is a step of its own")
    same(step(), whole, "again")

    process.signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(LinkDown, match="no signal within 1 s"):
        step()
    print(f"stalled: {time.monotonic() - began:.2f} s", flush=True)
    assert time.monotonic() - began < 2.0
    process.signal(signal.SIGCONT)
    began = time.monotonic()
    until(model._up)
    print(f"up again: {time.monotonic() - began:.2f} s", flush=True)
    same(step(), whole, "after the stall")

    steps, killed = list[Any](), list[float]()

    def kill() -> None:
        killed.append(time.monotonic())
        process.signal(signal.SIGKILL)

    def go_on() -> None:
        while True:
            steps.append(step())

    threading.Timer(2.0 if ALONE else 0.3, kill).start()
    with pytest.raises(LinkDown):
        go_on()
    print(f"killed after {len(steps)} steps, noticed in {time.monotonic() - killed[0]:.3f} s", flush=True)
    assert steps
    same(bench.step(plain, few, HALF), half, "the router's GPU goes on")
    model.close()
