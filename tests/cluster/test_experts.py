"""Experts that do not fit, that are rounded, and that are placed by load: real clusters, the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_calls import SMALL, Router, Start
from reference_model import CASES, Oracle

from forefetch import cli, rpc
from forefetch.v1 import expert_pb2, expert_pb2_grpc

CASE = "qwen3"
PROMPT = CASES[CASE].prompt


def test_load_is_measured_and_placed_and_changes_no_token(
    start: Start, oracle: Callable[[str], Oracle], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half the slots, over gRPC; then the same with hot experts on both workers and two thirds of their slots."""
    expected = oracle(CASE).greedy(PROMPT, 48)
    cluster = start(CASE, workers=2, link="grpc", worker=("--slots=50%",))
    router = Router(cluster.address)
    assert router.generate(PROMPT, 48).tokens == expected
    with rpc.channel(cluster.processes["worker-0"].address) as channel:
        stub = expert_pb2_grpc.ExpertServiceStub(channel)
        said = stub.GetStats(expert_pb2.ExpertServiceGetStatsRequest(), timeout=60)
    assert said.copied_bytes > 0
    assert said.copy_ns > 0
    stats = router.stats()
    pairs = sum(sum(layer.pairs) for layer in stats.expert_load)
    assert pairs == sum(worker.pairs for worker in stats.workers) > 0
    router.close()
    out = tmp_path / "placement.json"
    assert cli.main(["place", "--address", cluster.address, "--extra", "2", "--out", str(out)]) == 0
    assert "this placement" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["workers"]) == 2
    assert cli.main(["stats", "--address", cluster.address, "--load"]) == 0
    assert "hottest" in capsys.readouterr().out
    placed = start(CASE, workers=2, link="shm", worker=("--slots=66%", f"--placement={out}"), router=SMALL)
    router = Router(placed.address)
    answers = [router.generate(PROMPT, 48).tokens for _ in range(2)]
    assert answers == [expected] * 2
    assert sum(worker.experts for worker in router.stats().workers) == 3 * 2 * 6, "six places a layer on each"
    router.close()


def test_rounded_weights_are_named_in_every_answer(start: Start, tmp_path: Path) -> None:
    flags = ("--experts=int8", f"--cache-dir={tmp_path}")
    cluster = start(
        CASE, workers=1, link="shm", worker=("--slots=50%", *flags), router=(*SMALL, "--experts=int8", "--trunk=int8")
    )
    router = Router(cluster.address)
    answer = router.generate(PROMPT, 16)
    assert answer.finish.approximations.expert_format == answer.finish.approximations.trunk_format == "int8"
    assert [path.suffix for path in tmp_path.iterdir()] == [".experts"]
    assert router.generate(PROMPT, 16).tokens == answer.tokens
    router.close()


def test_shadowed_experts_are_counted_in_every_answer(start: Start, tmp_path: Path) -> None:
    """A single answer's count is the worker's; nothing else asked it for anything."""
    flags = ("--miss=shadow", f"--cache-dir={tmp_path}")
    cluster = start(CASE, workers=1, link="shm", worker=("--slots=50%", *flags), router=(*SMALL, "--miss=shadow"))
    router = Router(cluster.address)
    answer = router.generate(PROMPT, 16)
    with rpc.channel(cluster.processes["worker-0"].address) as channel:
        stub = expert_pb2_grpc.ExpertServiceStub(channel)
        said = stub.GetStats(expert_pb2.ExpertServiceGetStatsRequest(), timeout=60)
    named = answer.finish.approximations
    assert (named.expert_format, named.shadow_format) == ("", "int4")
    assert named.shadow_experts == said.shadowed > 0
    assert sum(layer.shadowed for layer in router.stats().hints.layers) == said.shadowed
    router.close()
