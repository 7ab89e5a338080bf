"""What handing blocks over costs the streams of one router: time per token right after blocks were sealed, and well after it.

    python -m benchmarks.kv_handover [--quick] [--seconds N] [--model DIR]

Two of eight streams fill a page at a time, one time in 32 steps. So the 16 steps behind it, while blocks are copied, sent and
stored, are beside the 16 before and the 16 after, in which nothing is: windows of a tenth of a second in one process, by the
hundred, in which neither a slow hour of the machine nor where a process lies in memory counts. A router without a KV service,
measured in the same way, says how much of the difference is none. Sessions write all the time; so runs with and without them
take turns on one router.
"""

from __future__ import annotations

import argparse
import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from time import monotonic
from typing import TYPE_CHECKING, Any

from benchmarks.kv_prefix import REFERENCE, STREAMS, cluster, prompt
from benchmarks.results import Row, append
from kv_service.client import KvClient

if TYPE_CHECKING:
    from forefetch.client import Client
    from forefetch.cluster import Cluster

WINDOW = 16
"""Steps behind a seal that count as handing over, and as many before and after that do not."""
AT_ONCE = 2
"""Streams that fill a page in the same step: every `2 * WINDOW` steps some do."""
PAGES = 6
"""Pages that each stream fills in a run."""
FULL = ("--budget-mb=192",)
"""A service whose memory is full, as it is but for its first minutes. Memory never touched before costs 1 ms a block more."""
WARMING = 6
"""Runs before any counts. Four of them fill the service."""
TRIM = 0.1
"""Share of the differences that is left out at either end: pauses of the machine, which hit both kinds of window."""


@dataclass
class Arm:
    """A router and how its streams run. `effects`: of each pair of windows, by how much of a step the first is slower."""

    name: str
    address: str
    sessions: bool = False
    effects: list[float] = field(default_factory=list)
    phases: list[list[float]] = field(default_factory=lambda: [[] for _ in range(2 * WINDOW)])
    steps_ms: list[float] = field(default_factory=list)  # mean of each run
    blocks: int = 0


async def run(arm: Arm, turn: int) -> None:
    """One run: PAGES pages of every stream."""
    from forefetch.client import Client

    async with Client(arm.address) as client:
        described, before = await client.describe(), (await client.stats()).kv.blocks_sent
        page = described.page_size
        assert page == STREAMS // AT_ONCE * 2 * WINDOW, "pages and windows fit each other"
        answers = await asyncio.gather(*(_stream(client, arm, turn, s, page, described.vocab_size) for s in range(STREAMS)))
        while (kv := (await client.stats()).kv).blocks_waiting:
            await asyncio.sleep(0.02)
        arm.blocks += kv.blocks_sent - before
    _note(arm, answers, page)


async def _stream(client: Client, arm: Arm, turn: int, stream: int, page: int, vocab: int) -> tuple[list[float], int]:
    """(when each token came, milliseconds; the index of the one whose step sealed the answer's first page)."""
    length = page - 1 - stream // AT_ONCE * 2 * WINDOW
    ids = prompt(1_000 + turn * STREAMS + stream + 100_000 * arm.sessions, length, vocab)
    session: dict[str, Any] = {"session": f"run-{turn}-{stream}", "session_mode": "start"} if arm.sessions else {}
    began = monotonic()
    answer = await client.complete(ids, max_tokens=PAGES * page + 1, ignore_eos=True, temperature=0.0, **session)
    return [1e3 * began + token.at_ms for token in answer.tokens], page - length


def _note(arm: Arm, streams: Sequence[tuple[list[float], int]], page: int) -> None:
    """Adds a run's windows, counted in steps of the first stream while all run; a seal is where its stream's token came."""
    first, last = max(times[0] for times, _ in streams), min(times[-1] for times, _ in streams)
    clock = [at for at in streams[0][0] if first < at <= last]
    gaps = [later - sooner for sooner, later in pairwise(clock)]
    arm.steps_ms.append(fmean(gaps))
    for times, sealing in streams[::AT_ONCE]:
        for at in times[sealing::page]:
            seal = bisect_left(clock, at - 0.5 * min(gaps))  # the step that sealed is between this one and the one before
            if not WINDOW < seal < len(gaps) - 2 * WINDOW:
                continue
            before, on, after = (gaps[seal + shift : seal + shift + WINDOW] for shift in (-WINDOW - 1, 0, WINDOW))
            off = (sum(before) + sum(after)) / 2
            arm.effects.append((sum(on) - off) / off)
            for phase, gap in zip(arm.phases, (*on, *after), strict=True):
                phase.append(gap)


def trimmed(values: Sequence[float]) -> tuple[float, float]:
    """(trimmed mean, its standard error by winsorising: Tukey and McLaughlin, 1963)."""
    ordered, cut = sorted(values), int(TRIM * len(values))
    kept = ordered[cut : len(ordered) - cut]
    low, high = kept[0], kept[-1]
    winsorised = [min(max(value, low), high) for value in ordered]
    return fmean(kept), stdev(winsorised) / ((1 - 2 * TRIM) * len(ordered) ** 0.5)


def handing_over(model: Path, seconds: float) -> list[Row]:
    """The change of time per token by the windows of two routers in turn; the one with a KV service has two of three."""
    with cluster(model, kv=False) as without, cluster(model, kv=True, kv_flags=FULL) as with_kv:
        arms = [Arm("no KV service", without.address), Arm("handed over", with_kv.address)]
        for turn in range(WARMING):
            asyncio.run(run(Arm("", arms[turn % 3 > 0].address), turn))
        until, turn = monotonic() + seconds, WARMING
        while monotonic() < until or turn < WARMING + 3:
            asyncio.run(run(arms[turn % 3 > 0], turn))
            turn += 1
        rows = [row for arm in arms for row in _windows(model.name, arm)]
        _look_at(with_kv, arms[1])
        return rows


def _look_at(running: Cluster, arm: Arm) -> None:
    """What the service says of the run: its memory was full, and how blocks came."""
    client = KvClient(running.processes["kv"].address)
    stats = client.stats()
    client.close()
    if not arm.blocks or not stats.evicted:
        raise SystemExit(f"{arm.blocks} blocks were handed over, and {stats.evicted} evicted: not what was to be measured")
    print(f"of {stats.stored} blocks {stats.shared_blocks} came through shared memory; {stats.evicted} were evicted")


def _windows(model: str, arm: Arm) -> list[Row]:
    # Half of all steps are in a first window, so the change of the mean step is half of the difference.
    change, error = (50 * value for value in trimmed(arm.effects))
    plain = 50 * fmean(arm.effects)
    quarters = [fmean(gap for gaps in arm.phases[at : at + 8] for gap in gaps) for at in range(0, 2 * WINDOW, 8)]
    print(f"{arm.name}: {len(arm.effects)} pairs, {arm.blocks} blocks; step {fmean(arm.steps_ms):.2f} ms")
    print(f"  change {change:+.2f} % +- {error:.2f} (untrimmed {plain:+.2f} %)")
    print(f"  steps behind a seal, in eights: {', '.join(f'{ms:.2f}' for ms in quarters)} ms")
    case = f"{model} {STREAMS} streams, windows, {arm.name}"
    return [
        Row("kv_handover", case, "time per token", fmean(arm.steps_ms), "ms"),
        Row("kv_handover", case, "time per token, change", change, "%"),
        Row("kv_handover", case, "time per token, standard error of the change", error, "%"),
    ]


def logging_sessions(model: Path, seconds: float) -> list[Row]:
    """The change of time per token by sessions, of runs that take turns on one router with a KV service."""
    with cluster(model, kv=True) as running:
        plain, logged = Arm("handed over", running.address), Arm("with sessions", running.address, sessions=True)
        until, turn, changes = monotonic() + seconds, 0, []
        while monotonic() < until or turn < 4:
            for arm in (plain, logged) if turn % 2 else (logged, plain):
                asyncio.run(run(arm, turn))
            if turn:  # the first is for warming up
                changes.append(logged.steps_ms[-1] / plain.steps_ms[-1] - 1)
            turn += 1
    change, error = (100 * value for value in trimmed(changes))
    print(f"with sessions, against none: {len(changes)} pairs of runs, change {change:+.2f} % +- {error:.2f}")
    case = f"{model.name} {STREAMS} streams, runs in turn, with sessions"
    return [
        Row("kv_handover", case, "time per token, change", change, "%"),
        Row("kv_handover", case, "time per token, standard error of the change", error, "%"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="40 seconds; prints, but records nothing")
    parser.add_argument("--seconds", type=float, default=270.0, help="how long it measures (default: 270)")
    parser.add_argument("--model", type=Path, default=REFERENCE, help="the checkpoint (default: models/reference)")
    args = parser.parse_args()
    seconds = 40.0 if args.quick else args.seconds
    rows = handing_over(args.model, 0.55 * seconds)
    rows += logging_sessions(args.model, 0.45 * seconds)
    if not args.quick:
        append(rows)


if __name__ == "__main__":
    main()
