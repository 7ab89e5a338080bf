"""How close the worker's copies into GPU slots come to the link's bandwidth.

    python -m benchmarks.expert_copies [--record]

For experts of Qwen3-30B-A3B's sizes in each format, from one pinned block, GB/s of: one large copy; expert after expert in
single copies; the same in the worker's chunks, all queued at once; and through the copier itself, which hands out copies one by
one and waits for each. Goal: at least 90 % of single copies.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter

import torch

from benchmarks.results import Row, append
from expert_worker.copying import Lane
from expert_worker.host import Host
from expert_worker.packed_slots import PackedPool
from expert_worker.residency import Residency
from expert_worker.slots import Slots
from forefetch.kernels.grouped_mlp.formats import ExpertFormat

HIDDEN, WIDTH, EXPERTS, ROUNDS = 2048, 768, 64, 5


def gbs(copied: int, run: Callable[[], None]) -> float:
    """Best of ROUNDS, after one to warm up."""
    best = float("inf")
    for number in range(ROUNDS + 1):
        torch.cuda.synchronize()
        began = perf_counter()
        run()
        torch.cuda.synchronize()
        best = min(best, perf_counter() - began) if number else best
    return copied / best / 1e9


def through_the_copier(pool: PackedPool, host: Host) -> Callable[[], None]:
    """Demands as many experts as there are slots, and waits until all are there."""
    lane = Lane(pool, host, False)

    def run() -> None:
        residency = Residency(Slots(EXPERTS, [EXPERTS]), lane.start, expert_bytes=host.stride, copy_ns=1e5, depth=2)
        with residency.changed:
            for expert in range(EXPERTS):
                residency.demand(expert)
            residency.changed.notify_all()
            while not all(map(residency.slots.is_ready, range(EXPERTS))):
                residency.changed.wait()
        residency.close()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="add rows to results.csv")
    args = parser.parse_args()
    device, rows = torch.device("cuda"), []
    columns = "".join(f"{heading:>10}" for heading in ("one copy", "experts", "chunks", "copier"))
    print(f"{'format':10} {'MiB':>6}{columns}   GB/s; the last two as shares of 'experts'")
    for kind in ("bfloat16", "int8", "int4"):
        format = ExpertFormat(kind)  # type: ignore[arg-type]
        host = Host(EXPERTS, HIDDEN, WIDTH, format, pinned=True)
        host.blobs.fill_(1)
        pool = PackedPool(EXPERTS, HIDDEN, WIDTH, format, device)
        size = host.blobs.nbytes

        def singly(pool: PackedPool = pool, host: Host = host) -> None:
            for slot in range(EXPERTS):
                pool.memory[slot].copy_(host.blobs[slot], non_blocking=True)

        def chunks(pool: PackedPool = pool, host: Host = host) -> None:
            for slot in range(EXPERTS):
                pool.fill(slot, host.blobs[slot], host.format)

        speeds = [gbs(size, lambda pool=pool, host=host: pool.memory.copy_(host.blobs, non_blocking=True))]  # type: ignore[misc]
        speeds += [gbs(size, run) for run in (singly, chunks, through_the_copier(pool, host))]
        shares = " ".join(f"{speed / speeds[1]:.0%}" for speed in speeds[2:])
        cells = "".join(f"{speed:10.1f}" for speed in speeds)
        print(f"{kind:10} {host.stride / 2**20:6.2f}{cells}   {shares}", flush=True)
        for name, speed in zip(("one copy", "single copies", "chunks", "copier"), speeds, strict=True):
            rows.append(Row("expert_copies", f"{kind} expert of {HIDDEN} x {WIDTH}, {name}", "bandwidth", speed, "GB/s"))
    if args.record:
        append(rows)


if __name__ == "__main__":
    main()
