"""64 greedy tokens of every case, through real processes, equal to transformers'.

Each family's first case runs on 1, 2 and 3 workers (8 experts: 3 does not divide them) over shm and over grpc, and with the
local worker; the other cases run on two workers over shm. Routers that differ in link share their workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import pytest
import torch
from cluster_calls import SMALL, Router
from reference_model import CASES, Oracle

from forefetch.process import Process

TOKENS = 64
FIRST_OF_FAMILY = {case.family: name for name, case in reversed(CASES.items())}
START_S = 240.0

# Both sides sum the same products in different orders, in float32, through at most 5 layers: some 1e-6 of the largest logit,
# which is about 20. Fifty times that is allowed; a wrong rule costs 0.01 and more.
LOGPROB_ATOL = 1e-3


def members(case: str) -> list[tuple[int, str]]:
    """Workers (0: local) and link of the routers that a case runs on."""
    if FIRST_OF_FAMILY[CASES[case].family] == case:
        return [(0, "local"), *((workers, link) for workers in (1, 2, 3) for link in ("shm", "grpc"))]
    return [(2, "shm")]


def _spawn(stack: ExitStack, module: str, flags: Sequence[str]) -> Process:
    process = Process(module, module, flags, dict(os.environ))
    stack.callback(process.end, 0.0)
    process.spawn()
    return process


@pytest.fixture(scope="module", params=CASES)
def fleet(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[tuple[str, dict[str, Router]]]:
    """A case and routers for it, by "workers x link"."""
    case = request.param
    model = [f"--model={checkpoint(case)}", "--device=cpu"]
    with ExitStack() as stack:
        workers = {
            shards: [_spawn(stack, "expert_worker", [*model, f"--shard={i}", f"--shards={shards}"]) for i in range(shards)]
            for shards in {shards for shards, _ in members(case) if shards}
        }
        for process in chain(*workers.values()):
            process.wait_ready(START_S)
        routers: dict[str, Process] = {}
        for shards, link in members(case):
            flags = [*model, *(SMALL if link == "grpc" else ())]
            flags.append(f"--workers={','.join(process.address for process in workers.get(shards, ())) or 'local'}")
            flags += [f"--link={link}"] if shards else []
            routers[f"{shards or 'in router'} x {link}"] = _spawn(stack, "router_service", flags)
        clients = {}
        for name, process in routers.items():
            process.wait_ready(START_S)
            clients[name] = Router(process.address)
            stack.callback(clients[name].close)
        yield case, clients


def test_64_greedy_tokens_equal(fleet: tuple[str, dict[str, Router]], oracle: Callable[[str], Oracle]) -> None:
    case, routers = fleet
    prompt = CASES[case].prompt
    expected = oracle(case).greedy(prompt, TOKENS)
    answers = {name: router.generate(prompt, TOKENS).tokens for name, router in routers.items()}
    assert answers == dict.fromkeys(routers, expected)


def test_log_probabilities_equal(fleet: tuple[str, dict[str, Router]], oracle: Callable[[str], Oracle]) -> None:
    case, routers = fleet
    prompt = CASES[case].prompt
    path = [*prompt, *oracle(case).greedy(prompt, TOKENS)]
    expected = oracle(case).prefill_logits(path[:-1])[len(prompt) - 1 :].log_softmax(-1)  # [TOKENS, V]
    for name, router in routers.items():
        events = router.generate(prompt, TOKENS, top_logprobs=20).events
        tops = torch.tensor([[top.logprob for top in event.top_logprobs] for event in events])
        torch.testing.assert_close(
            tops, expected.topk(20).values, atol=LOGPROB_ATOL, rtol=0, msg=lambda text, at=name: f"{at}: {text}"
        )
        chosen = torch.tensor([event.logprob.logprob for event in events])
        torch.testing.assert_close(chosen, expected.max(-1).values, atol=LOGPROB_ATOL, rtol=0)


def test_the_links_are_what_was_asked_for(fleet: tuple[str, dict[str, Router]]) -> None:
    case, routers = fleet
    for name, router in routers.items():
        workers = router.describe().workers
        shards, _, link = name.partition(" x ")
        assert {worker.link for worker in workers} == {link}
        assert len(workers) == (1 if shards == "in router" else int(shards))
        assert all(worker.up and worker.calls > 0 for worker in workers)
        assert sum(worker.experts for worker in workers) == len(moe_layers(case)) * 8


def moe_layers(case: str) -> list[int]:
    """Indices of the layers with routed experts."""
    config = CASES[case].config
    layers, sparse_step = config.get("num_hidden_layers", 3), config.get("decoder_sparse_step", 1)
    return [i for i in range(layers) if i not in config.get("mlp_only_layers", ()) and (i + 1) % sparse_step == 0]
