"""What became of lookahead, layer by layer: the step ring's sums as messages, and those as metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from forefetch.telemetry.ring import LAYER_TOTALS, StepRing
from forefetch.v1 import router_pb2

_KINDS = ("all", "next", "second", "refined")
_RESULTS = ("hits", "late", "misses", "resident")


def layer_hints(ring: StepRing, layers: Iterable[int]) -> list[router_pb2.LayerHints]:
    """The sums of `layers` over all finished steps. From any thread."""
    totals = ring.layer_totals().tolist()
    return [_message(layer, dict(zip(LAYER_TOTALS, totals[layer], strict=True))) for layer in layers]


def _message(layer: int, sums: dict[str, int]) -> router_pb2.LayerHints:
    message = router_pb2.LayerHints(layer=layer, chosen=sums.pop("chosen"))
    for kind in _KINDS:
        prefix = "" if kind == "all" else kind + "_"
        count = router_pb2.HintCount(named=sums.pop(prefix + "named"), found=sums.pop(prefix + "found"))
        getattr(message, kind).CopyFrom(count)
    for name, value in sums.items():
        setattr(message, name, value)
    return message


def experts(stats: router_pb2.GetStatsResponse) -> Iterator[tuple[tuple[str, ...], float]]:
    """(layer, hint, what) -> distinct experts."""
    for layer in stats.hints.layers:
        yield (str(layer.layer), "", "chosen"), layer.chosen
        for kind in _KINDS:
            count = getattr(layer, kind)
            yield (str(layer.layer), kind, "named"), count.named
            yield (str(layer.layer), kind, "found"), count.found


def results(stats: router_pb2.GetStatsResponse) -> Iterator[tuple[tuple[str, ...], float]]:
    """(layer, result) -> distinct experts of calls."""
    for layer in stats.hints.layers:
        for result in _RESULTS:
            yield (str(layer.layer), result), getattr(layer, result)


def bytes_moved(stats: router_pb2.GetStatsResponse) -> Iterator[tuple[tuple[str, ...], float]]:
    """(layer, what) -> bytes."""
    for layer in stats.hints.layers:
        yield (str(layer.layer), "copied"), layer.copied_bytes
        yield (str(layer.layer), "wasted"), layer.wasted_bytes


def shadowed(stats: router_pb2.GetStatsResponse) -> Iterator[tuple[tuple[str, ...], float]]:
    """(layer,) -> experts of calls that were evaluated in fewer bits."""
    for layer in stats.hints.layers:
        yield (str(layer.layer),), layer.shadowed


def stalls(stats: router_pb2.GetStatsResponse) -> Iterator[tuple[tuple[str, ...], float]]:
    """(layer,) -> seconds."""
    for layer in stats.hints.layers:
        yield (str(layer.layer),), layer.stall_ns * 1e-9
