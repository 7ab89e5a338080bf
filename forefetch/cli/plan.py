"""`forefetch plan`: what fits, how fast a token could be and why not faster, and chart values to start from."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from forefetch import plan
from forefetch.errors import ConfigError, UnsupportedModel
from forefetch.families import read_spec
from forefetch.plan import Fit, Hardware, Speed, Wanted, gib
from forefetch.plan_chart import chart_values
from forefetch.shapes import PREFIX, SHAPES, synthetic_config
from forefetch.spec import ModelSpec

EPILOG = f"""\
Known shapes: {", ".join(SHAPES)}. Any folder with a config.json will do as well.

Examples:
  forefetch plan qwen3-30b-a3b --batch 64 --context 4096 --kv-format e2m0 --expert-format int4
  forefetch plan qwen3-30b-a3b --memory-gib 24 --hbm-gbs 900 --pcie-gbs 25 --slots 25%
  forefetch plan models/reference --hardware cpu --workers 2 --link grpc --values my-values.yaml

Times are those of the model in forefetch/plan.py: bytes over bandwidth plus fixed costs, with even routing. Status 1: it does
not fit."""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "plan",
        help="size a deployment: what fits, how fast, which chart values",
        description="Computes what a model needs, what fits into a device, the time per token and the term that limits it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a known shape, or the folder of a checkpoint")
    usual = Wanted()
    work = parser.add_argument_group("work")
    work.add_argument("--batch", type=int, default=usual.batch, metavar="N", help="streams at a time (default: %(default)s)")
    work.add_argument("--context", type=int, default=usual.context, metavar="N", help="tokens of each (default: %(default)s)")
    work.add_argument("--kv-format", metavar="NAME", help=f"{', '.join(plan.KV_FORMATS)} (default: as the weights)")
    work.add_argument("--expert-format", metavar="NAME", help=f"{', '.join(plan.EXPERT_BYTES)} (default: as the weights)")
    work.add_argument(
        "--trunk-format", default=usual.trunk_format, metavar="NAME", help=f"{', '.join(plan.TRUNK_FORMATS)} (default: stored)"
    )
    work.add_argument(
        "--workers", type=int, default=0, metavar="N", help="expert workers, each with a device; 0: in the router"
    )
    work.add_argument("--link", metavar="NAME", help="how they are reached: p2p, shm, grpc (default: shm)")
    work.add_argument("--apart", action="store_true", help="with --link p2p: no experts on the router's device")
    work.add_argument("--slots", metavar="N%", help="share of the experts that is resident (default: what fits)")
    work.add_argument(
        "--missed",
        metavar="N%",
        help="needed experts that are in no slot, as `forefetch stats` shows them (default: of even routing, the worst; the "
        "reference model misses 42, 17 and 5%% at 25, 50 and 75%% slots, one stream)",
    )
    work.add_argument("--recall", type=float, default=0.0, metavar="R", help="share of missing experts hinted in time, 0 to 1")
    machine = parser.add_argument_group("hardware")
    machine.add_argument("--hardware", default="h200", choices=plan.HARDWARE, help="where figures come from (default: h200)")
    machine.add_argument("--memory-gib", type=float, metavar="G", help="device memory, instead")
    machine.add_argument("--hbm-gbs", type=float, metavar="G", help="GB/s of device memory, instead")
    machine.add_argument("--pcie-gbs", type=float, metavar="G", help="GB/s from host to device, instead")
    parser.add_argument("--values", metavar="FILE", help="write the chart values there; - prints them alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """0 when it fits, 1 when it does not. ConfigError or UnsupportedModel for what makes no sense."""
    spec, hardware = _spec(args.model), _hardware(args)
    wanted = _wanted(args, spec, hardware)
    placed = plan.fit(spec, wanted, hardware)
    expected = plan.speed(spec, wanted, hardware, placed) if placed.fits else None
    folder = Path(args.model).resolve().name if Path(args.model).is_dir() else args.model
    values = chart_values(spec, wanted, placed, model=folder, gpu=hardware.dtype == "") if placed.fits else {}
    if args.json:
        print(json.dumps(_as_json(wanted, placed, expected, values)))
    elif args.values == "-":
        sys.stdout.write(to_yaml(values))
    else:
        _show(Console(highlight=False), spec, wanted, hardware, placed, expected, values)
    if args.values not in (None, "-") and values:
        Path(args.values).write_text(to_yaml(values), encoding="utf-8")
    return 0 if placed.fits else 1


def _spec(model: str) -> ModelSpec:
    name = model.removeprefix(PREFIX)
    if name.partition(",")[0] in SHAPES:
        return read_spec(synthetic_config(PREFIX + name), {}, name)
    if not (Path(model) / "config.json").is_file():
        raise UnsupportedModel(f"{model} is neither a known shape ({', '.join(SHAPES)}) nor a folder with a config.json")
    return ModelSpec.load(Path(model))


def _hardware(args: argparse.Namespace) -> Hardware:
    given = {name: getattr(args, name) for name in ("memory_gib", "hbm_gbs", "pcie_gbs")}
    given = {name: value for name, value in given.items() if value is not None}
    chosen = plan.HARDWARE[args.hardware]
    return replace(chosen, **given, source=f"{chosen.source}; {', '.join(given)} as given") if given else chosen


def _wanted(args: argparse.Namespace, spec: ModelSpec, hardware: Hardware) -> Wanted:
    native = hardware.dtype or spec.dtype
    wanted = Wanted(
        batch=args.batch,
        context=args.context,
        kv_format=args.kv_format or native,
        expert_format=args.expert_format or native,
        trunk_format=args.trunk_format,
        workers=args.workers,
        link=args.link or ("shm" if args.workers else "local"),
        apart=args.apart,
        slots=None if args.slots is None else _share(args.slots, "--slots"),
        missed=None if args.missed is None else _share(args.missed, "--missed"),
        recall=args.recall,
    )
    wanted.validate(spec)
    if wanted.link not in hardware.link_us:
        raise ConfigError(f"--link: must be one of {', '.join(hardware.link_us)} on {hardware.name}")
    return wanted


def _share(text: str, flag: str) -> float:
    try:
        return float(text.removesuffix("%")) / 100
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not a percentage") from None


def _as_json(wanted: Wanted, placed: Fit, expected: Speed | None, values: dict[str, Any]) -> dict[str, Any]:
    timed = {"token_ms": expected.token_ms, "terms_ms": expected.terms, "limit": expected.limit} if expected else None
    return {"wanted": asdict(wanted), "fits": placed.fits, "fit": asdict(placed), "speed": timed, "values": values}


def _show(
    console: Console,
    spec: ModelSpec,
    wanted: Wanted,
    hardware: Hardware,
    placed: Fit,
    expected: Speed | None,
    values: dict[str, Any],
) -> None:
    size = plan.sizes(spec, wanted, hardware.dtype)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    kept = hardware.dtype or spec.dtype
    kept += "" if wanted.trunk_format == "stored" else f", matrices {wanted.trunk_format}"
    table.add_row("trunk", gib(size.trunk), f"{spec.layers} layers, hidden {spec.hidden_size}, {kept}")
    detail = f"{size.expert / 2**20:.2f} MiB each, {spec.num_experts} per layer, {wanted.expert_format}"
    table.add_row("experts", gib(size.experts * size.expert), detail)
    detail = f"{wanted.batch} streams x {wanted.context} tokens, {wanted.kv_format}; room for {placed.max_batch}"
    table.add_row("KV", gib(wanted.batch * size.kv_stream), detail)
    where = f"on each of {wanted.workers} workers" if wanted.workers else "beside the trunk"
    where += " and beside the trunk" if placed.shares > wanted.workers > 0 else ""
    detail = f"{placed.slots} of {size.experts} experts, {placed.per_layer:.1f} per layer, {where}"
    table.add_row("slots", gib(placed.worker), detail)
    table.add_row("host memory", gib(placed.host), "experts that wait" if placed.host else "nothing waits there")
    console.print(table)
    if expected is None:
        console.print(f"\n[bold red]does not fit:[/] {placed.problem}", soft_wrap=True)
        return
    _show_speed(console, wanted, expected)
    console.print(f"\n[dim]Figures: {hardware.source}.[/]", soft_wrap=True)
    console.print("\nChart values (deploy/chart):\n")
    console.print(to_yaml(values), markup=False, soft_wrap=True)


def _show_speed(console: Console, wanted: Wanted, expected: Speed) -> None:
    rate = 1e3 * wanted.batch / expected.token_ms
    console.print(f"\n[bold]{expected.token_ms:.2f} ms per token[/], {rate:,.0f} tokens/s; limited by {expected.limit}")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in expected.terms.items():
        share = value / expected.token_ms
        table.add_row(name, f"{value:.2f} ms", f"{share:4.0%}", "█" * round(30 * share))
    console.print(table)


def to_yaml(values: Mapping[str, Any], indent: str = "") -> str:
    """Nested mappings of scalars as YAML; strings as JSON writes them, which is YAML too."""
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{name}:\n{to_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{name}: {json.dumps(value)}\n")
    return "".join(lines)
