"""The kernels in fragment order on a CPU, in the Gluon interpreter: one warp, or one program that has all items."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import gluon_interpreter
import numpy as np
import ptx
import pytest
import torch
from expert_pools import Call, Experts, make_call, make_experts, worst
from gluon_interpreter import FUNCTIONS, Interpreter, Pointer, Value
from torch import Tensor

from forefetch.kernels.grouped_mlp import direct, fragment, persistent
from forefetch.kernels.grouped_mlp.formats import ExpertFormat
from forefetch.kernels.grouped_mlp.fragment import Tuning
from forefetch.kernels.grouped_mlp.scratch import MoeScratch

FORMATS = [ExpertFormat(kind, group, "fragment") for kind in ("int4", "int8") for group in (128, 64)]  # type: ignore[arg-type]


def _pack(high: ptx.Words, low: ptx.Words) -> ptx.Words:
    halves = [word.view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32) for word in (high, low)]
    return halves[0] << np.uint32(16) | halves[1]


def _add(at: Pointer, value: Any, sem: str, scope: str, mask: Any = True) -> Value:
    """No two elements at the same address."""
    before = gluon_interpreter._load(at, mask)
    gluon_interpreter._store(at, before + value, mask)
    return before


def _value(x: Any) -> Value:
    return x if isinstance(x, Value) else Value(torch.tensor(x))


def _store(at: Pointer, value: Any, mask: Any = True) -> None:
    gluon_interpreter._store(at, _value(value), mask)


class Warp(Interpreter):
    """With what these kernels need beyond the attention's: modules by name, atomics, a program's only warp being number 0."""

    def language(self) -> Any:
        more: dict[str, Any] = {
            "SwizzledSharedLayout": lambda *a: None,
            "int16": torch.int16,
            "exp": lambda x: Value(torch.exp(x.data)),
            "load": lambda at, mask=True, other=0, **options: gluon_interpreter._load(at, mask, other),
            "store": _store,
            "where": lambda mask, a, b: gluon_interpreter._where(Value(_value(mask).data != 0), a, b),
            "minimum": lambda a, b: FUNCTIONS["minimum"](_value(a), _value(b)),
            "atomic_add": _add,
            "thread_barrier": lambda: None,
            "associative_scan": lambda x, axis, function: Value(x.data.cumsum(axis, dtype=x.dtype)),
        }
        return types.SimpleNamespace(**{**vars(super().language()), **more})

    def meaning(self, name: str, value: Any) -> Any:
        if isinstance(value, types.ModuleType) and value.__name__.startswith("forefetch"):
            return types.SimpleNamespace(**{n: self.meaning(n, v) for n, v in vars(value).items() if not n.startswith("__")})
        return super().meaning(name, value)


@pytest.fixture(autouse=True)
def instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    zero: Callable[..., ptx.Words] = lambda text, inputs, outputs: [next(iter(inputs.values()))]  # noqa: E731
    run = ptx.run
    monkeypatch.setattr(ptx, "run", lambda text, *a: zero(text, *a) if "%tid.x" in text else run(text, *a))
    monkeypatch.setitem(ptx.OPERATIONS, "cvt.rn.f16x2.f32", _pack)


def layouts(form: ExpertFormat, experts: int) -> dict[str, Any]:
    padded = max(32, 1 << (experts - 1).bit_length())
    nothing = dict.fromkeys(("MMA", "A", "B", "WORDS", "COPY", "SCALES", "SCALE_COPY", "INPUTS"))
    shape = types.SimpleNamespace(shape=[padded])
    return {"WARPS": 1, "GROUP": form.group, "BITS": form.bits, **nothing, "EXPERTS": shape, "EP": padded, "LANES": None}


def constants(bits: int) -> Tensor:
    return torch.tensor([{4: 0x8008, 8: 0x8080}[bits] - 65536, 0x8080 - 65536], dtype=torch.int16)


def launch(kernel: Any, grid: int, given: dict[str, Any], eager: bool) -> None:
    Warp(eager).run(kernel, (grid,), *(given[name] for name in kernel.arg_names))


def combined(call: Call, scratch: MoeScratch, held: Tensor) -> Tensor:
    rows = scratch.y.view(len(call.x), -1, scratch.hidden)
    return (torch.where(held[..., None], rows, 0.0) * call.weights[..., None]).sum(1)


def run_direct(
    pool: Experts, call: Call, tiles: int, logits: Tensor | None, eager: bool, sums: bool = False
) -> tuple[Tensor, MoeScratch]:
    (tokens, hidden), top_k, form, experts = call.x.shape, call.ids.shape[1], pool.format, len(pool.slot_of)
    scratch, out = pool.scratch(tokens, top_k, call.x.dtype), torch.full((tokens, hidden), torch.nan)
    ids = scratch.ids if logits is not None else call.ids.int()
    shared = {
        **{
            "ids": ids,
            "weights": call.weights if logits is None else scratch.weights,
            "logits": ids if logits is None else logits,
            "slot_of": pool.slot_of,
        },
        **{"pool": pool.pool.view(torch.int32), "pool_half": pool.pool.view(torch.float16), "live": scratch.live},
        **{"constants": constants(form.bits), "stride": pool.pool.stride(0) // 2048, "row_stride": hidden // 2},
        **{"H": hidden, "W": pool.width, "E": experts, "K": top_k, "TYPE": call.x.dtype, "TILES": tiles},
        **{"CHOOSE": logits is not None, "RENORMALISE": True, "PDL": False, **layouts(form, experts)},
        **{"out": out, "out_row": hidden, "done": scratch.done, "SUM": sums, "COLUMNS": None},
    }
    for gate in (True, False):
        source, to = (call.x, scratch.h) if gate else (scratch.h, scratch.y)
        blocks = (pool.width // 16 if gate else hidden // 32) // tiles
        given = {**shared, "source": source.view(torch.int32), "to": to, "GATE": gate}
        launch(direct.product, tokens * top_k * blocks, given, eager)
    assert not scratch.done.any()
    return (out if sums else combined(call, scratch, scratch.live.view(call.ids.shape) != 0)), scratch


@pytest.mark.parametrize(("tiles", "sums"), [(1, True), (2, False)])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_few_tokens(form: ExpertFormat, tiles: int, sums: bool) -> None:
    """Two tokens, one of whose pairs has no expert and one an expert without a slot; copies late."""
    pool = make_experts(3, 256, 128, form)
    call = make_call(2, 2, pool, torch.bfloat16)
    call.ids[0, 1] = -1
    pool.slot_of[int(call.ids[1, 0])] = -1
    out, _ = run_direct(pool, call, tiles, None, eager=False, sums=sums)
    assert worst(pool, call, out) <= 1


def test_few_tokens_from_logits() -> None:
    pool = make_experts(40, 128, 128, FORMATS[0])
    call = make_call(2, 3, pool, torch.bfloat16)
    logits = torch.randint(-9, 10, (2, 40), generator=torch.Generator().manual_seed(3)).bfloat16()
    order = logits.float().sort(dim=1, descending=True, stable=True)  # ties to the lower index
    call.ids, call.weights = order.indices[:, :3].contiguous(), order.values[:, :3].softmax(1)
    pool.slot_of[int(call.ids[1, 0])] = -1
    out, scratch = run_direct(pool, call, 1, logits, eager=True)
    assert torch.equal(scratch.ids.view(2, 3).long(), call.ids)
    assert torch.allclose(scratch.weights.view(2, 3), call.weights, rtol=1e-5)
    assert worst(pool, call, out) <= 1


@pytest.mark.parametrize("tuning", [*fragment.TUNING.values(), Tuning(gate_tiles=2)], ids=["one", "two", "both"])
@pytest.mark.parametrize(("form", "hidden"), [(FORMATS[0], 256), (FORMATS[2], 128), (FORMATS[1], 512)], ids=str)
def test_a_batch(form: ExpertFormat, hidden: int, tuning: Tuning) -> None:
    """More than eight tokens for an expert, one program with item after item; copies as late as they may be."""
    pool = make_experts(2, hidden, 128, form)
    call = make_call(10, 1, pool, torch.float16, skew=2.0)
    call.ids[3] = -1
    tokens, experts = len(call.x), len(pool.slot_of)
    scratch, held = pool.scratch(tokens, 1, torch.float16), call.ids >= 0
    for pair in held.flatten().nonzero().flatten().tolist():
        expert = int(call.ids.flatten()[pair])
        scratch.table[expert * tokens + int(scratch.counts[expert])] = pair
        scratch.counts[expert] += 1
    sixteenth = torch.where(torch.arange(hidden) & 2 == 0, 1.0, 0.0625) if form.bits == 4 else torch.ones(hidden)
    scratch.x_half.copy_(call.x * sixteenth)
    given = {
        **{"x": scratch.x_half.view(torch.int32), "pool": pool.pool.view(torch.int32)},
        **{"pool_half": pool.pool.view(torch.float16), "slot_of": pool.slot_of, "counts": scratch.counts},
        **{"table": scratch.table, "h": scratch.h.view(torch.int32), "h_half": scratch.h, "y": scratch.y},
        **{"ready": scratch.ready, "tickets": scratch.tickets, "fault": scratch.fault, "constants": constants(form.bits)},
        "room": tokens,
        **{"stride": pool.pool.stride(0) // 2048, "H": hidden, "W": pool.width, "E": experts, "K": 1},
        **{"D": fragment.stages(scratch, tuning), "GATE_TILES": tuning.gate_tiles, "DOWN_TILES": tuning.down_tiles},
        **{"SHORT": True, "PDL": False, **layouts(form, experts)},
    }
    launch(persistent.experts, 2, given, eager=False)
    scratch.check()
    assert not scratch.tickets.any()
    assert worst(pool, call, combined(call, scratch, held)) <= 1
