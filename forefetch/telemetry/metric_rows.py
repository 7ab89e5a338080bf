"""Which metric shows which field of a GetStats, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from forefetch.telemetry import hints, names
from forefetch.v1 import expert_pb2, router_pb2

Message = TypeVar("Message")
Value = tuple[Sequence[str], float]
Row = tuple[names.Metric, Callable[[Message], "float | Iterable[Value]"]]


def _of_workers(field: str) -> Callable[[router_pb2.GetStatsResponse], list[Value]]:
    return lambda stats: [((worker.address,), float(getattr(worker, field))) for worker in stats.workers]


def _of_kv(field: str) -> Callable[[router_pb2.GetStatsResponse], list[Value]]:
    return lambda stats: [((), float(getattr(stats.kv, field)))] if stats.kv.address else []


def _ended(stats: router_pb2.GetStatsResponse) -> list[Value]:
    return [(("OK",), stats.requests_ok), *(((status,), count) for status, count in stats.requests_failed.items())]


def _load(stats: expert_pb2.ExpertServiceGetStatsResponse) -> Iterator[Value]:
    for layer in stats.load:
        for expert, pairs in zip(layer.experts, layer.pairs, strict=True):
            yield (str(layer.layer), str(expert)), pairs


def _found(stats: expert_pb2.ExpertServiceGetStatsResponse) -> list[Value]:
    return [(("hit",), stats.hits), (("late",), stats.late), (("miss",), stats.misses), (("resident",), stats.resident)]


def _moved(stats: expert_pb2.ExpertServiceGetStatsResponse) -> list[Value]:
    return [(("loaded",), stats.experts_loaded), (("unloaded",), stats.experts_unloaded)]


ROUTER: tuple[Row[Any], ...] = (
    (names.REQUESTS, _ended),
    (names.RUNNING, lambda stats: stats.running),
    (names.WAITING, lambda stats: stats.waiting),
    (names.PAGES, lambda stats: stats.pages_total),
    (names.PAGES_USED, lambda stats: stats.pages_used),
    (names.PROMPT_TOKENS, lambda stats: stats.prompt_tokens),
    (names.COMPLETION_TOKENS, lambda stats: stats.completion_tokens),
    (names.STEPS, lambda stats: stats.steps),
    (names.STEPS_REPLAYED, lambda stats: stats.replayed_steps),
    (names.P2P_STEPS, lambda stats: stats.p2p_steps),
    (names.P2P_BREAKS, lambda stats: stats.p2p_breaks),
    (names.WORKER_UP, _of_workers("up")),
    (names.WORKER_RECONNECTS, _of_workers("reconnects")),
    (names.WORKER_PAIRS, _of_workers("pairs")),
    (names.WORKER_CALLS, _of_workers("calls")),
    (names.HINTS_SENT, lambda stats: stats.hints.sent),
    (names.HINTS_DROPPED, lambda stats: stats.hints.dropped),
    (names.HINT_FAILURES, lambda stats: stats.hints.failures),
    (names.HINT_EXPERTS, hints.experts),
    (names.HINT_RESULTS, hints.results),
    (names.HINT_BYTES, hints.bytes_moved),
    (names.HINT_STALL, hints.stalls),
    (names.SHADOWED, hints.shadowed),
    (names.KV_UP, _of_kv("up")),
    (names.KV_SENT, _of_kv("blocks_sent")),
    (names.KV_DROPPED, _of_kv("blocks_dropped")),
    (names.KV_WAITING, _of_kv("blocks_waiting")),
    (names.KV_RECONNECTS, _of_kv("reconnects")),
    (names.KV_LOADS, _of_kv("prefix_loads")),
    (names.KV_LOADED, _of_kv("blocks_loaded")),
    (names.KV_LOADED_BYTES, _of_kv("bytes_loaded")),
    (names.KV_PREFIX_MISSES, lambda stats: [((reason,), count) for reason, count in stats.kv.prefix_misses.items()]),
    (names.KV_SKIPPED, _of_kv("prefix_skipped")),
    (names.SESSIONS, _of_kv("sessions")),
    (names.SESSION_RECORDS, _of_kv("session_records")),
    (names.SESSION_FAILURES, lambda stats: [((reason,), count) for reason, count in stats.kv.session_failures.items()]),
)
EXPERT: tuple[Row[Any], ...] = (
    (names.EXPERT_CALLS, lambda stats: stats.calls),
    (names.EXPERT_ROWS, lambda stats: stats.rows),
    (names.EXPERT_PAIRS, lambda stats: stats.pairs),
    (names.EXPERT_ERRORS, lambda stats: stats.errors),
    (names.EXPERT_BYTES, lambda stats: stats.weight_bytes),
    (names.EXPERT_COMPUTE, lambda stats: stats.compute_ns * 1e-9),
    (names.EXPERT_FOUND, _found),
    (names.EXPERT_SHADOWED, lambda stats: stats.shadowed),
    (names.EXPERT_COPIED, lambda stats: stats.copied_bytes),
    (names.EXPERT_WASTED, lambda stats: stats.wasted_bytes),
    (names.EXPERT_COPY, lambda stats: stats.copy_ns * 1e-9),
    (names.EXPERT_COPY_WAIT, lambda stats: stats.copy_wait_ns * 1e-9),
    (names.EXPERT_COPIES_FAILED, lambda stats: stats.copies_failed),
    (names.EXPERT_MOVED, _moved),
    (names.EXPERT_HINTS, lambda stats: stats.hints),
    (names.EXPERT_HINTS_DROPPED, lambda stats: stats.hints_dropped),
    (names.EXPERT_ROUTERS, lambda stats: stats.routers),
    (names.EXPERT_LOAD, _load),
)
SPANS: tuple[Row[Any], ...] = (
    (names.SPANS_SENT, lambda exporter: exporter.sent),
    (names.SPANS_DROPPED, lambda exporter: exporter.dropped),
)
_FAULTS = (
    *("corrupt", "short_reads", "read_errors", "disk_full", "write_errors", "broken", "no_room", "stale_writers", "mismatches"),
    *("slow_peers", "damaged_at_start", "unauthenticated", "stale_epochs", "sessions_refused", "sessions_dropped"),
)
KV: tuple[Row[Any], ...] = (
    (names.KV_BLOCKS, lambda stats: stats.blocks),
    (names.KV_BYTES, lambda stats: stats.bytes),
    (names.KV_BUDGET, lambda stats: stats.budget_bytes),
    (names.KV_HITS, lambda stats: stats.hits),
    (names.KV_MISSES, lambda stats: stats.misses),
    (names.KV_STORED, lambda stats: stats.stored),
    (names.KV_REFUSED, lambda stats: stats.refused),
    (names.KV_EVICTED, lambda stats: stats.evicted),
    (names.KV_CONFLICTS, lambda stats: stats.conflicts),
    (names.KV_DUPLICATES, lambda stats: stats.duplicates),
    (names.KV_MEMORY, lambda stats: stats.memory_bytes),
    (names.KV_DISK_BLOCKS, lambda stats: stats.disk_blocks),
    (names.KV_DISK_READS, lambda stats: stats.disk_reads),
    (names.KV_FAULTS, lambda stats: [((kind,), float(getattr(stats, kind))) for kind in _FAULTS]),
    (names.KV_SESSIONS, lambda stats: stats.sessions),
    (names.KV_SESSION_BYTES, lambda stats: stats.session_bytes),
    (names.KV_SESSION_RECORDS, lambda stats: stats.session_records),
)
