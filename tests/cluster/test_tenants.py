"""Callers of one router who must not meet: blocks and sessions of each are apart, whatever their requests say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_calls import SMALL, Start
from reference_model import CASES, Oracle
from waiting import until

from forefetch.client import SyncClient
from forefetch.errors import NotFound, Unauthenticated

CASE = "qwen3"
PROMPT = (CASES[CASE].prompt * 4)[:65]
TOKENS = {"ann": "ann-has-a-long-token", "bob": "bob-has-a-long-token"}


@pytest.fixture(scope="module")
def address(start: Start, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text("".join(f"{tenant}: {token}\n" for tenant, token in TOKENS.items()))
    return start(CASE, link="local", kv=True, router=(*SMALL, f"--auth-tokens={file}")).address


@pytest.fixture
def clients(address: str) -> Iterator[tuple[SyncClient, SyncClient]]:
    with SyncClient(address, token=TOKENS["ann"]) as ann, SyncClient(address, token=TOKENS["bob"]) as bob:
        yield ann, bob


@pytest.mark.parametrize("token", ["", "somebody-else-s-token"])
def test_nobody_else_gets_in(token: str, address: str) -> None:
    with SyncClient(address, token=token) as stranger:
        for call in (lambda: stranger.complete([5], max_tokens=1), stranger.stats, lambda: stranger.tokenize("x")):
            with pytest.raises(Unauthenticated):
                call()


def test_a_prefix_is_shared_within_a_tenant_only(
    clients: tuple[SyncClient, SyncClient], oracle: Callable[[str], Oracle]
) -> None:
    ann, bob = clients
    expected = oracle(CASE).greedy(PROMPT, 5)

    def cached(client: SyncClient) -> int:
        answer = client.complete(PROMPT, max_tokens=5, temperature=0.0, ignore_eos=True)
        assert answer.token_ids == expected
        until(lambda: client.stats().kv.blocks_waiting == 0)
        return answer.usage.cached_tokens

    assert [cached(ann), cached(ann), cached(bob), cached(bob)] == [0, 64, 0, 64]


def test_a_session_belongs_to_a_tenant(clients: tuple[SyncClient, SyncClient]) -> None:
    ann, bob = clients
    ann.complete(PROMPT, session="talk", session_mode="start", max_tokens=3)
    with pytest.raises(NotFound):
        bob.complete([5], session="talk", max_tokens=3)
    bob.complete([5, 6], session="talk", session_mode="start", max_tokens=3, ignore_eos=True)
    assert bob.complete([5], session="talk", max_tokens=1).usage.prompt_tokens == 6
    assert ann.complete([5], session="talk", max_tokens=1).usage.prompt_tokens >= len(PROMPT) + 2


def test_a_request_s_name_and_trace_belong_to_a_tenant(clients: tuple[SyncClient, SyncClient]) -> None:
    ann, bob = clients
    running = ann.generate(PROMPT, request_id="mine", max_tokens=100, ignore_eos=True)
    next(running)
    assert bob.complete(PROMPT, request_id="mine", max_tokens=2, ignore_eos=True).finish.request_id == "mine"
    assert len(list(running)) == 100
    assert len(ann.trace("mine").steps) > len(bob.trace("mine").steps) >= 2
    assert ann.trace("mine").request_id == "mine"
    ann.complete([5], request_id="only-mine", max_tokens=1)
    with pytest.raises(NotFound):
        bob.trace("only-mine")


def test_the_command_sends_a_token(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from forefetch.cli import main

    file = tmp_path / "token"
    file.write_text(TOKENS["ann"] + "\n")
    arguments = ["generate", "--address", address, "--max-tokens", "2", "hello"]
    assert main([*arguments, "--token-file", str(file)]) == 0
    assert "2 tokens" in capsys.readouterr().err
    assert main(arguments) != 0
