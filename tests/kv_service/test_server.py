"""The KV service over gRPC: what it promises, what it refuses, and that it stays up."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from otlp_receiver import GrpcReceiver

from forefetch.errors import ConfigError
from forefetch.process import Process
from forefetch.settings import build, child_environment
from forefetch.telemetry.context import new_root, to_metadata
from forefetch.v1 import kv_pb2 as pb
from kv_service.client import Geometry, KvClient, chain, root_key
from kv_service.config import KvConfig

if TYPE_CHECKING:
    from kv_calls import Kv
from kv_wire import MIB, wire

# What it promises


def test_blocks_come_back(kv: Kv) -> None:
    keys = kv.keys(1, 2, 3)
    sizes = [1, MIB, MIB + 1]
    blocks = [kv.block(key, size) for key, size in zip(keys, sizes, strict=True)]
    assert kv.client.put(zip(keys, blocks, strict=True)) == (3, 0)
    assert kv.client.look_up(keys) == 3
    assert kv.client.get(keys) == blocks
    assert kv.client.get(keys[1:]) == blocks[1:]


def test_get_streams_messages_of_one_to_two_mebibytes_in_order_and_stops_at_a_hole(start_kv: Callable[[KvConfig], Kv]) -> None:
    kv = start_kv(KvConfig(budget_mb=64, max_block_mb=8))
    keys = kv.keys(*range(8))
    sizes = [3 * MIB, 700_000, 700_000, 2 * MIB, 10, 10, MIB + 1]
    kv.client.put([(key, kv.block(key, size)) for key, size in zip(keys, sizes, strict=False)])
    messages = [message.parts for message in kv.stub.Get(pb.GetRequest(keys=map(wire, keys)))]
    assert [[(part.index, len(part.data), part.last, bool(part.checksum)) for part in parts] for parts in messages] == [
        [(0, 2 * MIB, False, False)],
        [(0, MIB, True, True)],
        [(1, 700_000, True, True), (2, 700_000, True, True)],
        [(3, 2 * MIB, True, True)],
        [(4, 10, True, True), (5, 10, True, True), (6, MIB + 1, True, True)],
    ]
    assert kv.client.get(keys) == [kv.block(key, size) for key, size in zip(keys, sizes, strict=False)]


def test_a_look_up_of_the_last_held_block(kv: Kv) -> None:
    keys = kv.keys(1, 2, 3, 4)
    kv.put([keys[0], keys[2]])
    assert (kv.client.look_up(keys), kv.client.find_last(keys), kv.client.find_last(keys[3:])) == (1, 3, 0)


def test_puts_are_idempotent_and_conflicts_are_counted(kv: Kv) -> None:
    (key,) = kv.keys(1)
    assert [kv.put([key]), kv.put([key])] == [(1, 0), (1, 0)]
    assert kv.client.put([(key, b"other")]) == (0, 1)
    assert kv.client.get([key]) == [kv.block(key)]
    stats = kv.client.stats()
    assert (stats.blocks, stats.stored, stats.refused, stats.conflicts) == (1, 1, 1, 1)


@pytest.mark.parametrize("change", [{"token_ids": (9, 9)}, {"token_ids": (1,)}, {"parent": bytes(32)}])
def test_token_ids_and_parent_are_verified(kv: Kv, change: dict[str, Any]) -> None:
    """A digest that is held does not get a block whose tokens or prefix are others."""
    (key,) = kv.keys(1)
    kv.put([key])
    assert kv.client.get([key._replace(**change)]) == []
    assert kv.client.stats().mismatches == 1
    assert kv.client.get([key]) == [kv.block(key)]


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": b"other"},
        {"model_digest": "model2"},
        {"geometry": Geometry(2, 2, 16)},
        {"geometry": Geometry(2, 4, 8)},
        {"geometry": Geometry(3, 2, 8)},
        {"rope": "yarn"},
        {"kv_format": "e2m0"},
        {"params": "outliers=1"},
        {"page_size": 8},
    ],
)
def test_other_settings_always_miss(kv: Kv, change: dict[str, Any]) -> None:
    """The same tokens under another model, RoPE, format, page size or tenant's salt."""
    mine: dict[str, Any] = {"tenant": b"", "model_digest": "model", "geometry": Geometry(2, 2, 8), "rope": "rope"}
    mine |= {"kv_format": "float32", "params": "", "page_size": 4}
    tokens = [[1, 2, 3, 4], [5, 6, 7, 8]]
    keys, others = (chain(root_key(**settings), tokens) for settings in (mine, mine | change))
    kv.client.put([(key, b"data") for key in keys])
    assert kv.client.look_up(keys) == 2
    assert kv.client.look_up(others) == 0
    assert kv.client.get(others) == []
    assert kv.client.get([others[0], keys[1]]) == []


def test_eviction_keeps_the_budget_and_the_prefix(kv: Kv) -> None:
    keys = kv.keys(*range(12))
    assert kv.put(keys, MIB) == (8, 4)
    assert kv.put(kv.keys(100), 2 * MIB) == (1, 0)
    assert kv.client.look_up(keys) == 5  # down to the low watermark
    stats = kv.client.stats()
    assert stats.bytes <= stats.budget_bytes == 8 * MIB
    assert (stats.evicted, stats.blocks) == (3, 6)


def test_stats_count_what_happened(kv: Kv) -> None:
    keys = kv.keys(1, 2, 3)
    kv.put(keys[:2])
    kv.client.look_up(keys)
    stats = kv.client.stats()
    assert (stats.hits, stats.misses, stats.blocks, stats.bytes) == (2, 1, 2, 200)
    assert stats.uptime_s > 0


# The process


@pytest.fixture
def process() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(*flags: str) -> Process:
        one = Process("kv", "kv_service", flags, child_environment(PYTHONWARNINGS="error"))
        started.append(one)
        one.spawn()
        one.wait_ready(240)
        return one

    yield start
    for one in started:
        one.end(20)


def test_a_process_forgets_and_has_a_new_name_after_a_restart(kv: Kv, process: Callable[..., Process]) -> None:
    one = process("--budget-mb=4", "--max-block-mb=3")
    client = KvClient(one.address)
    keys = kv.keys(1, 2)
    before = client.describe()
    assert (before.budget_bytes, before.max_block_bytes) == (4 * MIB, 3 * MIB)
    assert client.put([(key, b"data") for key in keys]) == (2, 0)
    one.signal(signal.SIGKILL)
    one.end(20)
    one.spawn()
    one.wait_ready(240)
    assert client.describe().instance_id != before.instance_id
    assert client.look_up(keys) == 0
    client.close()
    one.signal(signal.SIGTERM)
    assert one.wait(60)
    assert one.ending() == "ended with status 0"


def test_spans_and_metrics_of_a_process(kv: Kv, process: Callable[..., Process]) -> None:
    import urllib.request

    receiver = GrpcReceiver()
    one = process(f"--otlp-endpoint={receiver.endpoint}", "--metrics-listen=127.0.0.1:0")
    client, caller = KvClient(one.address), new_root(sampled=True)
    keys = kv.keys(1)
    client.put([(keys[0], b"data")], metadata=to_metadata(caller))
    client.look_up(keys, metadata=to_metadata(caller))
    client.get(keys, metadata=to_metadata(caller))
    client.get(keys)
    client.close()
    spans = receiver.wait(lambda spans: len(spans) >= 3)
    assert {span.name for span in spans} == {"forefetch.kv.put", "forefetch.kv.look_up", "forefetch.kv.get"}
    assert {(span.service, span.trace, span.parent) for span in spans} == {
        ("forefetch-kv", caller.trace_id.hex(), caller.span_id.hex())
    }
    with urllib.request.urlopen(f"http://{one.metrics}/metrics", timeout=60) as page:
        shown = page.read().decode()
    assert "forefetch_kv_stored_total 1.0" in shown
    assert "forefetch_spans_dropped_total 0.0" in shown
    receiver.close()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_block_mb": "0"}, "--max-block-mb: must be at least 1"),
        ({"budget_mb": "63"}, "--budget-mb: must be at least --max-block-mb, which is 64"),
        ({"budget_mb": "much"}, "--budget-mb: 'much' is not a whole number"),
    ],
)
def test_wrong_settings(settings: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(KvConfig, settings, {})
    assert str(caught.value) == text


def test_settings_from_the_environment() -> None:
    config = build(KvConfig, {"budget_mb": "100"}, {"FOREFETCH_KV_MAX_BLOCK_MB": "3", "FOREFETCH_KV_BUDGET_MB": "7"})
    assert (config.limits.memory, config.limits.disk, config.max_block_bytes) == (100 * MIB, 0, 3 * MIB)
