"""A KV service with a folder: killed and started again, it gives a router back what it held, from disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cluster_calls import SMALL, Router, Start
from reference_model import CASES, Oracle
from waiting import until

from forefetch import rpc
from forefetch.v1 import kv_pb2, kv_pb2_grpc

CASE, PAGE, N = "qwen3", 16, 8
PROMPT = (CASES[CASE].prompt * 9)[: 6 * PAGE + 1]


def test_a_killed_service_still_has_its_blocks(start: Start, oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    cluster = start(CASE, link="local", kv=True, kv_flags=(f"--dir={tmp_path}",), router=(*SMALL, "--kv-fetch-s=60"))
    router = Router(cluster.address)

    def stats() -> kv_pb2.KvServiceGetStatsResponse:
        with rpc.channel(cluster.processes["kv"].address) as channel:
            reply: kv_pb2.KvServiceGetStatsResponse = kv_pb2_grpc.KvServiceStub(channel).GetStats(
                kv_pb2.KvServiceGetStatsRequest(), timeout=60
            )
            return reply

    first = router.generate(PROMPT, N)
    assert first.tokens == oracle(CASE).greedy(PROMPT, N)
    until(lambda: stats().disk_blocks == 6)
    cluster.kill("kv")
    until(lambda: not router.stats().kv.up)
    cluster.restart("kv")
    until(lambda: router.stats().kv.up)
    assert (stats().blocks, stats().disk_reads, stats().stored) == (6, 0, 0)
    again = router.generate(PROMPT, N)
    assert again.tokens == first.tokens
    assert again.finish.usage.cached_tokens == 6 * PAGE
    assert (stats().disk_reads, stats().stored) == (6, 0)
    router.close()
