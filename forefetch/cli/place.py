"""`forefetch place`: a placement of experts on workers from the load that a router measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

from forefetch import placement
from forefetch.cli import connect
from forefetch.client import SyncClient
from forefetch.errors import ConfigError
from forefetch.placement import Shard

EPILOG = """\
Examples:
  forefetch place --workers 4 --out placement.json                 as many experts on each as now, packed by load
  forefetch place --workers 4 --extra 2 --out placement.json       two more places a layer on each, for replicas of hot experts
  forefetch up --model models/reference --workers 4 --placement placement.json"""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "place",
        help="plan which worker holds which experts, from measured load",
        description="Reads the load of every expert from a router, plans shards of equal size with replicas of the hottest\n"
        "experts, and writes a file for the workers' --placement. Restart workers with it, one after the other or all.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    connect.add_arguments(parser)
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="workers to plan for (default: the router's)")
    parser.add_argument("--extra", type=int, default=0, metavar="N", help="places for replicas on each worker and layer (0)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the placement goes")


def run(args: argparse.Namespace) -> int:
    """ConfigError when nothing was measured, or for a plan that cannot be."""
    with SyncClient(args.address, tls=connect.tls_of(args), token=connect.token_of(args)) as client:
        stats = client.stats()
    loads = {layer.layer: list(map(float, layer.pairs)) for layer in stats.expert_load}
    if not any(map(sum, loads.values())):
        raise ConfigError("--address: this router has measured no load yet; send it requests first")
    workers = args.workers or len(stats.workers)
    planned = placement.plan(loads, workers, args.extra)
    args.out.write_text(placement.dump(planned), encoding="utf-8")
    experts = len(next(iter(loads.values())))
    equal: list[Shard] = [dict.fromkeys(loads, shard) for shard in placement.shard_of(experts, workers)]
    print("Load of the busiest worker over the mean (mean of the layers / worst layer):")
    for name, shards in (("equal parts", equal), ("this placement", planned)):
        uneven = placement.burden(loads, shards)
        print(f"  {name:16} {mean(uneven):.2f} / {max(uneven):.2f}")
    held = len(planned[0][next(iter(loads))])
    print(f"Written to {args.out}: {held} of {experts} experts a layer on each of {workers} workers.")
    return 0
