"""Whether hints are worth it where a CPU's experts have fewer slots: the time of a token with hints against none, in pairs.

    python -m benchmarks.slot_hints [--quick] [--seconds N] [--model DIR] [--record]

One router in one process turns its hints on for 16 steps and off for 112, and so on. The median step of 16 with hints is
compared with the 16 before and the third 16 behind, in which there are none and slots no longer hold what hints or prompts
brought: a fifth of a second, by the hundred, in which neither a slow hour of the machine nor where a process lies in memory
counts. What is given is the median of these differences with a 95 % interval that assumes nothing of their distribution (order
statistics). A placebo, 16 steps without hints that are compared in the same way, says how much of it is none; the gain is each
window's difference less that of the placebo beside it. Medians of steps, so that single slow ones do not count. Beside them:
how many experts a step needed and did not find, and how long it waited for copies.

With the defaults it takes some seven minutes: stored and int8 experts, slots for 25 % and 50 %, one and four streams. Answers
are checked against those of a router whose experts all have slots.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from benchmarks.expert_slots import one_round, prompts
from benchmarks.results import Row, append
from forefetch.cluster import Cluster, ClusterConfig, Extra
from forefetch.process import Process

WINDOW = 16
WINDOWS = 18
"""Of a run: a first one that is thrown away, two rounds of `switching_router.WAYS`, and a last one off."""
BEHIND = 3
"""So many windows after one that is looked at hints' traces are gone."""
TOKENS = WINDOW * WINDOWS + 2
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Window:
    """Steps of one way: the median of their times; of a mean one what it did not find, and how long it waited for copies."""

    way: str
    ms: float
    absent: float
    copied: float
    wait_ms: float


def windows(notes: Sequence[tuple[int, str, Sequence[int]]]) -> list[Window]:
    """Those of one run, without the first step of each, which still pays for the way before."""
    found = []
    for first in range(0, len(notes) - WINDOW, WINDOW):
        steps = notes[first + 1 : first + WINDOW + 1]  # the last one is the beginning of the next window
        (_, way, before), (_, _, after) = steps[0], steps[-1]
        each = [(b - a) / (WINDOW - 1) for a, b in zip(before, after, strict=True)]
        step = median(b - a for (a, *_), (b, *_) in pairwise(steps))
        found.append(Window(way, step / 1e6, each[1] + each[2], each[5], each[8] / 1e6))
    return found


def effects(runs: Sequence[Sequence[Window]], way: str) -> list[float]:
    """Of each window of a way, by how much of a step it is slower than its neighbours, the one behind being farther away: steps
    take longer as their context grows."""
    found = []
    for run in runs:
        for before, now, behind in zip(run, run[1:], run[1 + BEHIND :], strict=False):
            if now.way == way:
                off = (BEHIND * before.ms + behind.ms) / (BEHIND + 1)
                found.append(100 * (now.ms - off) / off)
    return found


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lower and upper end of its 95 % interval): order statistics, by the normal approximation of the binomial."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = int(len(ordered) / 2 - half), int(len(ordered) / 2 + half)
    return median(ordered), ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)]


@contextmanager
def cluster(args: argparse.Namespace, slots: str, experts: str, steps: Path | None) -> Iterator[Cluster]:
    """One that answers; with `steps` its router turns hints on and off and writes down there what steps took."""
    plain = Process.launch

    def launch(command: list[str], *, env: dict[str, str], **rest: Any) -> Any:
        at, path = command.index("router_service"), [str(ROOT), env.get("PYTHONPATH", "")]
        command[at : at + 1] = ["benchmarks.switching_router", "--steps", str(steps), "--window", str(WINDOW)]
        return plain(command, env=env | {"PYTHONPATH": os.pathsep.join(filter(None, path))}, **rest)

    settings = {"model": str(args.model), "link": "local", "slots": slots, "experts": experts, "device": "cpu"}
    Process.launch = staticmethod(launch) if steps else plain
    try:
        running = Cluster.start(
            ClusterConfig(**settings, port=0, kv=False), extra=Extra(router=("--hints=plain" if steps else "--hints=off",))
        )
    finally:
        Process.launch = plain
    with running:
        yield running


def measure(running: Cluster, args: argparse.Namespace, streams: int, file: Path, right: dict[int, Any]) -> list[list[Window]]:
    """Runs of one arrangement. `right`: answers, of runs by their number."""
    file.write_text("")
    until, turn = monotonic() + args.seconds, 0
    while turn < 3 or monotonic() < until:
        found = answers(running, args, streams, turn)
        if found != right.get(turn, found):
            raise SystemExit("slots or hints changed an answer")
        turn += 1
    asyncio.run(one_round(running.address, prompts(args.model, 1, 0), 1))  # its prompt has the last run written down
    runs = [windows(json.loads(line)) for line in file.read_text().splitlines()]
    return [run for run in runs[1:] if len(run) == WINDOWS]  # without the first, which warms up


def answers(running: Cluster, args: argparse.Namespace, streams: int, turn: int) -> list[list[int]]:
    """Those of one run."""
    return asyncio.run(one_round(running.address, prompts(args.model, streams, streams * turn), TOKENS))[1]


def show(case: str, runs: list[list[Window]]) -> list[Row]:
    """Prints one arrangement's figures and returns them."""
    of = {way: [window for run in runs for window in run if window.way == way] for way in ("off", "hints", "placebo")}
    rows = []
    print(f"{case}: {len(of['hints'])} pairs")
    found = {way: effects(runs, way) for way in ("hints", "placebo")}
    found["gain"] = [hints - none for hints, none in zip(found["hints"], found["placebo"], strict=True)]
    for way, differences in found.items():
        value, low, high = interval(differences)
        print(f"  {way:8} {value:+6.2f} %  [{low:+.2f}, {high:+.2f}]")
        rows += [
            Row("slot_hints", f"{case}, {way}", f"time per token, {name}", x, "%")
            for name, x in (("median change", value), ("change, 95 % low", low), ("change, 95 % high", high))
        ]
    for way in ("off", "hints"):
        absent, copied, wait = (fmean(getattr(window, name) for window in of[way]) for name in ("absent", "copied", "wait_ms"))
        ms = median(window.ms for window in of[way])
        print(f"  {way:8} {ms:6.2f} ms; a step lacks {absent:4.1f} experts, copies {copied / 1e6:.2f} MB, waits {wait:.3f} ms")
        rows.append(Row("slot_hints", f"{case}, {way}", "time per token", ms, "ms"))
        rows.append(Row("slot_hints", f"{case}, {way}", "experts absent", absent, "per step"))
        rows.append(Row("slot_hints", f"{case}, {way}", "copy wait", wait, "ms"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/reference"))
    parser.add_argument("--shares", nargs="+", default=["25%", "50%"], help="slots (%(default)s)")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--experts", nargs="+", default=["stored", "int8"], help="formats (%(default)s)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each arrangement (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="int8, 50 %%, 15 seconds")
    parser.add_argument("--record", action="store_true", help="add rows to results.csv")
    args = parser.parse_args()
    if args.quick:
        args.shares, args.experts, args.seconds = ["50%"], ["int8"], 15.0
    rows = []
    for experts in args.experts:
        with cluster(args, "100%", experts, None) as resident:
            right = {count: {turn: answers(resident, args, count, turn) for turn in (0, 1)} for count in args.streams}
        for share in args.shares:
            with TemporaryDirectory() as folder:
                file = Path(folder) / "steps"
                with cluster(args, share, experts, file) as running:
                    for count in args.streams:
                        runs = measure(running, args, count, file, right[count])
                        rows += show(f"{args.model.name} local, {experts}, {share}, {count} streams", runs)
    if args.record:
        append(rows)


if __name__ == "__main__":
    main()
