"""Kills routers and their KV service at random points; what they serve afterwards is what a fresh computation gives.

Each round kills one of two routers and the KV service (with a folder, and less disk than blocks) while streams with sessions
run, greedy and seeded. Streams that broke off go on on the other router, the others must not notice. After the round every
block that the service serves is compared with the K and V that transformers computes for the same tokens. Over pages of two
bits with a window, answers are compared with those of a router that has no KV service. The seed is fixed; the moment within a
step is the machine's.

    python -m pytest tests/cluster/test_crashes.py --crash-rounds 110 --timeout 3600 -s     the long form
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from cluster_calls import Background, Router
from forks import Forks, ForkServer
from reference_model import CASES, Oracle
from waiting import PATIENCE_S, until

from forefetch.rpc.auth import ANONYMOUS
from forefetch.spec import ModelSpec
from forefetch.synthetic import open_model
from forefetch.v1 import router_pb2
from kv_service.client import Key, KvClient
from router_service.naming import Naming

CASE, SEED = "qwen3", 20261129
MORE = 20
"""Rounds beyond those that are asked for, at most, until everything has been met."""
PAGE, LONG, STREAMS = 16, 50, 4
SEALED = ("--page-size=32", "--kv-format=e2m0", "--kv-recent=20")
FLAGS = (
    "--max-batch=16",
    "--max-step-tokens=40",
    "--kv-memory-mb=8",
    "--kv-fetch-s=60",
    "--threads=1",
    "--hints=off",
    "--log-level=error",
)
KV_FLAGS = ("--budget-mb=1", "--max-block-mb=1", "--disk-gb=0.001", "--log-level=error")
PREFIX = CASES[CASE].prompt
PROMPTS = [[*PREFIX, *PREFIX[:: 1 + i % 2], 7 + i, *((PREFIX * 3)[: 9 * (i % 5)])] for i in range(16)]
START, RESUME = router_pb2.SESSION_MODE_START, router_pb2.SESSION_MODE_RESUME
SAMPLING = {
    "greedy": router_pb2.SamplingParams(temperature=0.0),
    "seeded": router_pb2.SamplingParams(temperature=0.8, seed=7, top_p=0.95),
}
# float32 sums of at most 64 terms in another order, three layers deep: K and V of size 10 differ by 64 * 2**-24 * 10 a layer.
# Those of other tokens differ by over 0.1.
TOLERANCE = 5e-4


@dataclass
class Truth:
    """What a fresh computation gives: answers, and the K and V of prompt and answer as blocks have them."""

    oracle: Oracle
    spec: ModelSpec
    naming: Naming | None  # None: K and V are not what transformers has, only answers are compared
    answers: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    chains: list[tuple[list[Key], np.ndarray[Any, Any]]] = field(default_factory=list)
    worst: float = 0.0

    @torch.no_grad()
    def add(self, prompt: int, how: str, answer: list[int]) -> None:
        self.answers[prompt, how] = answer
        if self.naming is None:
            return
        if how == "greedy":
            assert answer == self.oracle.greedy(PROMPTS[prompt], LONG)
        tokens = [*PROMPTS[prompt], *answer]
        blocks = (len(tokens) - 1) // PAGE
        held = self.oracle.model(input_ids=torch.tensor([tokens]), use_cache=True).past_key_values
        kv = torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in held.layers])  # [L, 2, Hkv, T, D]
        cut = kv[:, :, :, : blocks * PAGE].unflatten(3, (blocks, PAGE)).movedim(3, 0)
        keys = self.naming.extend([], ANONYMOUS, tokens, blocks)
        self.chains.append((keys, cut.reshape(blocks, -1).numpy()))

    def learn(self, router: Router) -> None:
        """All answers, of a router that computes everything."""
        for prompt, ids in enumerate(PROMPTS):
            for how, sampling in SAMPLING.items():
                self.add(prompt, how, router.generate(ids, LONG, sampling=sampling).tokens)
        router.close()

    def check(self, client: KvClient) -> int:
        """Compares every block that the service has; how many these were."""
        served = 0
        for keys, blocks in self.chains:
            for first in range(len(keys)):  # beyond holes too
                if client.look_up(keys[first : first + 1]):
                    for data in client.get(keys[first : first + 1]):
                        got = np.frombuffer(data, dtype=np.float32)
                        assert got.shape == blocks[first].shape
                        self.worst = max(self.worst, float(np.abs(got - blocks[first]).max()))
                        assert self.worst < TOLERANCE
                        served += 1
        return served


@dataclass
class Stage:
    """Two routers over one KV service, and what has been seen so far."""

    kv: Forks
    routers: tuple[Forks, Forks]
    truth: Truth
    seen: Counter[str] = field(default_factory=Counter)

    def note(self, stats: router_pb2.GetStatsResponse) -> None:
        self.seen["loaded"] += stats.kv.blocks_loaded + stats.kv.rows_loaded
        self.seen["internal"] += stats.kv.prefix_misses.get("internal", 0) + stats.kv.prefix_misses.get("mismatch", 0)

    def compare(self) -> None:
        """What the service holds now, with the truth."""
        client = KvClient(self.kv.address)
        self.seen["blocks compared"] += self.truth.check(client)
        stats = client.stats()
        for name in ("disk_reads", "evicted", "conflicts", "corrupt", "short_reads", "read_errors", "damaged_at_start"):
            self.seen[name] += getattr(stats, name)
        client.close()


@pytest.fixture(params=["float32", "e2m0"])
def stage(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    oracle: Callable[[str], Oracle],
    fork_server: ForkServer,
    tmp_path: Path,
) -> Iterator[Stage]:
    folder, dense = checkpoint(CASE), request.param == "float32"
    spec, opened = open_model(str(folder), allow_synthetic=False)
    naming = Naming.of(spec, opened.digest, "float32", "computed in torch.float32", PAGE)
    kv = Forks(fork_server, "kv_service", [f"--dir={tmp_path}", *KV_FLAGS])
    pages = (f"--page-size={PAGE}",) if dense else SEALED
    flags = [f"--model={folder}", "--device=cpu", "--workers=local", *FLAGS, *pages]
    truth = Truth(oracle(CASE), spec, naming if dense else None)
    alone = Forks(fork_server, "router_service", flags)
    truth.learn(Router(alone.start()))
    alone.close()
    flags.append(f"--kv={kv.start()}")
    both = Forks(fork_server, "router_service", flags), Forks(fork_server, "router_service", flags)
    for one in both:
        one.start()
    yield Stage(kv, both, truth)
    for one in (*both, kv):
        one.close()


def streams_of(router: Router, round_: int, draw: random.Random, count: int) -> list[tuple[str, int, str, Background]]:
    streams = []
    for index in range(count):
        prompt, how = draw.randrange(len(PROMPTS)), draw.choice(list(SAMPLING))
        name = f"crash-{round_}-{index}"
        params = router_pb2.SessionParams(id=name, mode=START)
        more = {"session": params, "sampling": SAMPLING[how]}
        streams.append((name, prompt, how, Background(router, PROMPTS[prompt], LONG, **more)))
    return streams


def resume(router: Router, name: str, seen: int, patience_s: float = PATIENCE_S) -> list[int] | None:
    """The rest of an answer; None: its session never began. Tried again while the router does not reach the service yet."""
    request = router_pb2.GenerateRequest(session=router_pb2.SessionParams(id=name, mode=RESUME, next_index=seen))
    limit = time.monotonic() + patience_s
    while True:
        try:
            events = list(router.stub.Generate(request, timeout=60))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > limit:
                raise
            time.sleep(0.05)
        else:
            assert events[-1].HasField("finish")
            return [event.token.token_id for event in events[:-1]]


def crash(stage: Stage, draw: random.Random, streams: Sequence[Background], victim: Forks) -> None:
    """Kills the victim and the KV service, in any order, at any distance."""
    try:
        streams[draw.randrange(len(streams))].wait_for(draw.randrange(LONG - 10))
    except AssertionError:  # it has ended already
        stage.seen["late"] += 1
    time.sleep(draw.random() * 0.03)
    for killed in draw.sample((victim, stage.kv), 2):
        killed.kill()
        time.sleep(draw.choice((0.0, draw.random() * 0.05)))


def one_round(stage: Stage, round_: int, draw: random.Random) -> None:
    at = draw.randrange(2)
    victim, heir = stage.routers[at], stage.routers[1 - at]
    old, new = Router(victim.address), Router(heir.address)
    until(lambda: old.stats().kv.up and new.stats().kv.up)
    stage.note(old.stats())
    mine = streams_of(old, round_, draw, STREAMS - 1)
    others = streams_of(new, round_ + 1_000_000, draw, 1)
    crash(stage, draw, [stream for *_, stream in mine], victim)
    stage.kv.start()
    for name, prompt, how, stream in mine:
        whole, seen = stage.truth.answers[prompt, how], stream.done().tokens
        assert seen == whole[: len(seen)]
        assert stream.error is None or stream.error.code() is grpc.StatusCode.UNAVAILABLE, stream.error
        until(lambda: new.stats().kv.up)
        rest = resume(new, name, len(seen))
        assert rest is not None or not seen
        if rest is None:
            stage.seen["not begun"] += 1
        else:
            assert seen + rest == whole, (round_, name, how, len(seen))
            stage.seen["resumed"] += stream.error is not None
    for _, prompt, how, stream in others:
        tokens = stream.done().tokens
        assert tokens == stage.truth.answers[prompt, how][: len(tokens)]
        refused = stream.error is not None and not tokens  # the service was away when its session was to begin
        assert refused or (stream.error is None and len(tokens) == LONG), stream.error
        stage.seen["undisturbed"] += not refused
    old.close()
    new.close()
    victim.start()


def test_what_is_served_after_kills_is_what_a_fresh_computation_gives(stage: Stage, request: pytest.FixtureRequest) -> None:
    rounds, draw = request.config.getoption("--crash-rounds"), random.Random(SEED)
    first = Router(stage.routers[0].address)
    for prompt, ids in enumerate(PROMPTS):
        for how, sampling in SAMPLING.items():
            assert first.generate(ids, LONG, sampling=sampling).tokens == stage.truth.answers[prompt, how]
    first.close()
    stage.compare()
    seen, met = stage.seen, ["resumed", "loaded", *(["blocks compared", "disk_reads", "evicted"] if stage.truth.naming else [])]
    done = 0

    def all_met() -> bool:
        return all(seen[name] for name in met) and seen["resumed"] + seen["undisturbed"] > rounds

    while done < rounds or (done < rounds + MORE and not all_met()):
        one_round(stage, done, draw)
        stage.compare()
        done += 1
        if done % 10 == 0:
            print(f"{done} rounds: {dict(seen)}", flush=True)
    kills = stage.kv.kills, sum(one.kills for one in stage.routers)
    print(f"\n{kills[0]} kills of the service, {kills[1]} of routers: {dict(seen)}; K and V off by {stage.truth.worst:.1e}")
    assert kills == (done, done)
    assert all_met(), seen
    faults = ("corrupt", "short_reads", "read_errors", "damaged_at_start", "internal")
    assert not any(seen[name] for name in faults), seen
