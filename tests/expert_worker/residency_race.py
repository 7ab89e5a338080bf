"""Layers in one process, choices and copies in two others, which take turns, over the same memory: what streams of a GPU do, in
the interpreter.

    python residency_race.py LAYERS

Run by test_in_place.py. Ends in an error when an output is not that of resident experts, or when nothing was ever moved. A copy
in the interpreter takes milliseconds, so that whatever is read while it is written would show.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
# Ours first: tests/forefetch has the name of the package.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from triton_interpreter import complete_interpreter

from expert_worker.in_place import InPlaceExperts
from expert_worker.moving import turn
from expert_worker.packed import PackedExperts
from forefetch.kernels import residency
from forefetch.kernels.grouped_mlp.formats import ExpertFormat
from forefetch.kernels.residency.state import Mover, Residents
from forefetch.synthetic import open_model

complete_interpreter()

SHAPE = "layers=3,hidden_size=64,moe_intermediate_size=32,experts=8,num_experts_per_tok=2,vocab_size=64"
SLOTS, LAYERS, EXPERTS = 7, 3, 8
BROUGHT = residency.COUNTERS.index("brought")
_MAPS: list[mmap.mmap] = []  # kept: tensors do not


def shared(like: torch.Tensor) -> torch.Tensor:
    """A copy in memory that a forked process shares."""
    _MAPS.append(mmap.mmap(-1, like.nbytes))
    made = torch.frombuffer(_MAPS[-1], dtype=like.dtype).view(like.shape)
    made.copy_(like)
    return made


def shared_state(few: InPlaceExperts) -> Residents:
    """Its slots, empty and full of NaN, and its host memory one behind the other, and tables for them."""
    old = few.state
    rows = shared(torch.cat([torch.full_like(old.slots, 255), old.host]))
    new = Residents(rows[:SLOTS], rows[SLOTS:], old.members, LAYERS, EXPERTS)
    given = {field.name for field in fields(new)} - {"table"}
    for name, value in vars(new).items():
        if isinstance(value, torch.Tensor) and name not in given and name != "base":
            setattr(new, name, shared(value))
    return new


def move(state: Residents, mover: Mover, draw: random.Random) -> None:
    """Chooses and copies for ever, for the layers behind wherever the first process is."""
    while True:
        now = max(0, int(state.active)) if draw.random() < 0.7 else draw.randrange(LAYERS)
        state.chance[draw.randrange(LAYERS * EXPERTS)] = 0.95
        state.averages[:, draw.randrange(LAYERS * EXPERTS)] = draw.random() / 4
        turn(state, mover, now, min(2, LAYERS - 1 - now), residency.LEAST, afresh=True)
        time.sleep(draw.random() / 100)  # else who has had a turn has the next


def main() -> None:
    torch.set_num_threads(1)
    residency.launches.PATIENCE = 3
    residency.launches._PROGRAMS, residency.launches._BLOCK = 3, 256  # a copy in many small pieces takes its time
    spec, checkpoint = open_model(f"synthetic:qwen3-30b-a3b,{SHAPE}", allow_synthetic=True)
    how: Any = {"device": torch.device("cpu"), "dtype": torch.float32, "max_rows": 4}
    model = spec, checkpoint, tuple(range(EXPERTS)), ExpertFormat("float32")
    whole, few = PackedExperts(*model, **how), InPlaceExperts(*model, slots=SLOTS, **how)
    few.state = state = shared_state(few)
    few._move = lambda place, chosen: None  # type: ignore[method-assign]
    movers = [Mover.of(state, shared(torch.zeros_like(state.counters))) for _ in range(2)]
    children = list[int]()
    for number, mover in enumerate(movers):
        mover.jobs, mover.granted = shared(mover.jobs), shared(mover.granted)
        children.append(os.fork())
        if children[-1] == 0:
            move(state, mover, random.Random(number))
    try:
        numbers = torch.Generator().manual_seed(2)
        least = int(sys.argv[1])
        for number in range(20 * least):
            if number >= least and all(int(mover.counters[BROUGHT]) for mover in movers):
                break
            x, logits = torch.randn(1, 64, generator=numbers), torch.randn(1, EXPERTS, generator=numbers)
            out = few.route(number % LAYERS, x, logits).clone()
            if not torch.equal(out, whole.route(number % LAYERS, x, logits)):
                raise SystemExit(f"layer {number}: the output is not that of resident experts")
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    brought = [int(mover.counters[BROUGHT]) for mover in movers]
    counters = dict(zip(residency.COUNTERS, state.counters.tolist(), strict=True)) | {"brought": sum(brought)}
    if not all(brought):
        raise SystemExit("one of the two had no turn")
    if not (counters["brought"] > SLOTS and counters["hits"] + counters["resident"] and counters["late"] + counters["misses"]):
        raise SystemExit(f"too little happened: {counters}")
    print(counters)


if __name__ == "__main__":
    main()
