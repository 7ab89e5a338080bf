"""Hints between real processes: whatever is predicted, tokens and log-probabilities are the same to the bit.

Routers differ in link, mode and the file that their heads come from; those of one link share their workers. Wrong heads are
real files: written as training writes them, about the wrong experts or with probabilities that are NaN.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from cluster_calls import SMALL, Answer, Background, Router
from reference_model import CASES
from trunk_rig import Rig

from expert_worker import client
from forefetch.cluster import Cluster, ClusterConfig, Extra
from forefetch.process import Process
from forefetch.spec import ModelSpec
from forefetch.telemetry.ring import StepRing
from forefetch.weights import Checkpoint
from router_service.dispatch import Dispatch
from router_service.hints import Hints
from router_service.lookahead import store
from router_service.lookahead.estimate import Estimator, Network
from router_service.lookahead.heads import ATTENDED, REFINED, Head, Lookahead
from router_service.lookahead.store import Trained
from router_service.workers import Workers

CASE = "qwen3"
PROMPT = CASES[CASE].prompt
TOKENS = 24
START_S = 240.0


def wrong_heads(spec: ModelSpec, kind: str) -> Trained:
    """Heads that are wrong in one way, for every layer and distance."""
    draw, experts, hidden = torch.Generator().manual_seed(5), spec.num_experts, spec.hidden_size
    trained = Trained(
        {layer: 9.0 * torch.randn(experts, hidden, generator=draw) for layer in spec.moe_layers},
        {layer: torch.rand(experts, generator=draw) for layer in spec.moe_layers},
    )
    for layer in spec.moe_layers:
        for distance in (REFINED, 1, 2, ATTENDED + 1, ATTENDED + 2):
            width = hidden if distance == REFINED else 2 * hidden + experts
            up = 20.0 * torch.randn(experts, 4, generator=draw)
            network = Network(torch.randn(4, width, generator=draw), torch.zeros(4), up, torch.zeros(experts))
            trained.heads[layer, distance] = Head(network, float("nan") if kind == "NaN" else 1.0, 0.0)
    return trained


# name -> link, --hints, heads' file ("": none). Over both wires the same rows come back and are added in the same order.
ROUTERS = {
    "shm off": ("shm", "off", ""),
    "shm shuffled": ("shm", "attention", "shuffled"),
    "grpc NaN": ("grpc", "plain", "NaN"),
    "shm own gates": ("shm", "auto", ""),
    "local off": ("local", "off", ""),
    "local shuffled": ("local", "plain", "shuffled"),
}


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """folders("NaN") -> the checkpoint with such heads beside it; "" -> without."""
    plain = checkpoint(CASE)
    spec, digest = ModelSpec.load(plain), Checkpoint(plain).digest
    found = {"": plain}
    for kind in ("NaN", "shuffled"):
        found[kind] = tmp_path_factory.mktemp(kind) / plain.name
        shutil.copytree(plain, found[kind])
        store.save(wrong_heads(spec, kind), found[kind], digest)
    return found.__getitem__


def _spawn(stack: ExitStack, module: str, flags: list[str]) -> Process:
    process = Process(module, module, flags, dict(os.environ))
    stack.callback(process.end, 0.0)
    process.spawn()
    return process


@pytest.fixture(scope="module")
def workers(folders: Callable[[str], Path]) -> Iterator[list[str]]:
    """Addresses of two workers with too few slots."""
    with ExitStack() as stack:
        flags = [f"--model={folders('')}", "--device=cpu", "--shards=2", "--slots=4"]
        found = [_spawn(stack, "expert_worker", [*flags, f"--shard={i}"]) for i in range(2)]
        for worker in found:
            worker.wait_ready(START_S)
        yield [worker.address for worker in found]


@pytest.fixture(scope="module")
def routers(folders: Callable[[str], Path], workers: list[str]) -> Iterator[dict[str, Router]]:
    with ExitStack() as stack:
        addresses, processes = ",".join(workers), {}
        for name, (link, mode, heads) in ROUTERS.items():
            where = ["--slots=4"] if link == "local" else [f"--workers={addresses}", f"--link={link}"]
            flags = [f"--model={folders(heads)}", "--device=cpu", *SMALL, f"--hints={mode}", *where]
            processes[name] = _spawn(stack, "router_service", flags)
        clients = {}
        for name, process in processes.items():
            process.wait_ready(START_S)
            clients[name] = Router(process.address)
            stack.callback(clients[name].close)
        yield clients


def logprobs(answer: Answer) -> list[float]:
    return [event.logprob.logprob for event in answer.events]


def test_no_hint_changes_a_token_or_a_bit_of_its_log_probability(routers: dict[str, Router]) -> None:
    """A prompt in several chunks, and two streams side by side, so that steps have prompts, one row and two."""
    together: dict[str, tuple[list[int], list[int]]] = {}
    for name, router in routers.items():
        beside = Background(router, PROMPT[:5], TOKENS)
        together[name] = (router.generate(PROMPT * 2, TOKENS).tokens, beside.done().tokens)
    alone = {name: router.generate(PROMPT * 2, TOKENS, top_logprobs=0) for name, router in routers.items()}
    for name, answer in alone.items():
        off = "local off" if ROUTERS[name][0] == "local" else "shm off"
        assert together[name] == together[off], name
        assert answer.tokens == alone[off].tokens, name
        assert logprobs(answer) == logprobs(alone[off]), name  # alone, steps are the same from run to run


def test_what_was_sent_and_found_adds_up(routers: dict[str, Router]) -> None:
    for name, router in routers.items():
        router.generate(PROMPT, 40 if ROUTERS[name][1] == "auto" else 4)  # auto tries every mode for some steps
        hints = router.stats().hints
        if ROUTERS[name][1] == "off":
            assert (hints.setting, hints.mode, hints.sent) == ("off", "off", 0)
            assert sum(layer.misses for layer in hints.layers) > 0, "workers tell all the same"
            continue
        assert hints.setting == ROUTERS[name][1]
        assert hints.mode == hints.setting or hints.setting == "auto"
        assert hints.failures == 0
        assert hints.trained == bool(ROUTERS[name][2])
        assert (hints.sent > 0) == (ROUTERS[name][2] != "NaN"), name
        for layer in hints.layers:
            for count in (layer.all, layer.next, layer.second, layer.refined):
                assert count.found <= min(count.named, layer.chosen)
            assert layer.all.named <= layer.next.named + layer.second.named + layer.refined.named
            assert layer.hits + layer.late + layer.misses + layer.resident >= layer.chosen
        assert sum(layer.misses + layer.late + layer.hits for layer in hints.layers) > 0, "4 slots for 12 experts"
        if ROUTERS[name][2] == "":
            assert sum(layer.all.found for layer in hints.layers) > 0


def test_a_trace_tells_heads_from_workers(routers: dict[str, Router]) -> None:
    from forefetch.v1 import router_pb2

    router = routers["shm shuffled"]
    router.generate(PROMPT, 6, request_id="told")
    trace = router.stub.GetTrace(router_pb2.GetTraceRequest(request_id="told"), timeout=60)
    for step in trace.steps:
        parts = step.timings
        assert parts.lookahead_ns > 0
        own = (parts.attention_ns, parts.gate_ns, parts.lookahead_ns, parts.link_ns, parts.queue_ns, parts.copy_wait_ns)
        assert sum((*own, parts.expert_ns, parts.combine_ns, parts.sampling_ns)) <= parts.total_ns
    layers = [layer for step in trace.steps for layer in step.layers]
    assert any(layer.named for layer in layers)
    assert all(layer.found <= min(layer.named, layer.chosen) for layer in layers)
    assert sum(layer.lookahead_ns for layer in trace.steps[-1].layers) == trace.steps[-1].timings.lookahead_ns


def test_calls_go_on_when_only_the_hint_stream_breaks(folders: Callable[[str], Path], workers: list[str]) -> None:
    """A router's parts in this process, so that one of its streams can be broken and the other not."""
    rig, tokens = Rig(folders("")), []
    digest, spec = Checkpoint(folders("")).digest, rig.spec
    agreed = {"digest": digest, "hidden": spec.hidden_size, "dtype": torch.float32, "max_rows": 64}
    table = Workers(spec, workers, lambda address: client.connect(address, link="grpc", tls=None, timeout_s=60.0, **agreed))
    table.wait_complete(240.0)
    rig.experts = dispatch = Dispatch(table, 60.0)
    rig.ring = StepRing(4, spec.layers, 2)
    for broken in (False, True):
        heads = Lookahead(rig.trunk, Estimator(rig.trunk, {}), {})
        hints = rig.hints = Hints(heads, dispatch, setting="plain", trained=False)
        request = rig.add(PROMPT, TOKENS)
        for _ in range(4):
            rig.step()
        for worker in table.rows if broken else ():
            worker.link._hints._stream.cancel()  # type: ignore[union-attr]
        rig.run()
        tokens.append(request.tokens)
        assert hints.failures == 0
        assert (hints.dropped > 0) == broken
    assert tokens[0] == tokens[1]
    assert all(worker.link is not None and worker.reconnects == 0 for worker in table.rows), "no link was lost over it"
    table.close()


def test_a_worker_that_dies_under_hints_is_waited_for(folders: Callable[[str], Path]) -> None:
    config = ClusterConfig(
        model=str(folders("shuffled")), workers=2, link="shm", kv=False, port=0, device="cpu", start_s=START_S, slots="4"
    )
    with Cluster.start(config, extra=Extra((*SMALL, "--hints=attention", "--worker-grace-s=60"), (), ())) as cluster:
        router = Router(cluster.address)
        expected = router.generate(PROMPT, 150).tokens
        stream = Background(router, PROMPT, 150)
        stream.wait_for(8)
        cluster.kill("worker-1", signal.SIGKILL)
        cluster.restart("worker-1")
        assert stream.done().tokens == expected
        assert stream.finish is not None
        before = router.stats().hints.sent
        assert router.generate(PROMPT, 8).tokens == expected[:8]
        assert router.stats().hints.sent > before, "the new link has a hint stream of its own"
        router.close()
