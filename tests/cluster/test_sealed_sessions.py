"""Sessions over sealed pages of two bits with a window: what a killed router had answered goes on to the cold run's tokens."""

from __future__ import annotations

import pytest
from cluster_calls import SMALL, TRIES, Background, Router, Start
from reference_model import CASES
from waiting import until

from forefetch.v1 import router_pb2

CASE = "qwen3"
PROMPT = (CASES[CASE].prompt * 3)[:60]
N = 120
FORMAT = ("--page-size=32", "--kv-format=e2m0", "--kv-recent=16", "--kv-sinks=4", "--max-batch=16", "--max-step-tokens=20")
START, CONTINUE, RESUME = router_pb2.SESSION_MODE_START, router_pb2.SESSION_MODE_CONTINUE, router_pb2.SESSION_MODE_RESUME


def session(name: str, mode: router_pb2.SessionMode, next_index: int = 0) -> router_pb2.SessionParams:
    return router_pb2.SessionParams(id=name, mode=mode, next_index=next_index)


@pytest.mark.parametrize("exempt", ["", "1"])
def test_an_answer_goes_on_with_and_without_its_tail(exempt: str, start: Start) -> None:
    """The tail in the session's log is a saving: whether there is one changes no token, nor does a layer that is not sealed."""
    flags = (*FORMAT, f"--kv-exempt-layers={exempt}", "--session-lag-s=0.05")
    alone = Router(start(CASE, link="local", router=flags).address)
    cold = alone.generate(PROMPT, N).tokens
    kv = start(CASE, link="local", kv=True, router=SMALL).processes["kv"].address
    victim = start(CASE, link="local", router=(*flags, f"--kv={kv}"))
    old, heir = Router(victim.address), Router(start(CASE, link="local", router=(*flags, f"--kv={kv}")).address)
    until(lambda: old.stats().kv.up and heir.stats().kv.up)
    for name in ("computed", "over-a-cached-prefix"):
        for attempt in range(TRIES):  # it may have ended before the kill
            stream = Background(old, PROMPT, N, session=session(of := f"{name}-{attempt}", START))
            stream.wait_for(60)
            until(lambda: old.stats().kv.blocks_waiting == 0)
            victim.kill("router")
            seen = stream.done().tokens
            if stream.finish is None:
                break
            victim.restart("router")
            until(lambda: old.stats().kv.up)
        assert len(seen) < N
        assert seen == cold[: len(seen)]
        resumed = heir.stub.Generate(router_pb2.GenerateRequest(session=session(of, RESUME, len(seen))), timeout=60)
        *events, last = list(resumed)
        assert seen + [event.token.token_id for event in events] == cold, name
        assert last.finish.session.saved
        # Computed again is at most the tail: what was sealed when the service had all blocks, with 120 tokens less the window.
        assert last.finish.usage.cached_tokens >= (len(PROMPT) + 60 - 1 - 16) // 32 * 32, "blocks and tail came from the store"
        victim.restart("router")
        until(lambda: old.stats().kv.up)
    following = heir.generate([7, 8, 9], 20, session=session(of, CONTINUE))
    assert following.finish.usage.cached_tokens > (len(PROMPT) + N) // 32 * 32, "the session's tail, behind the last block"
    assert following.tokens == alone.generate([*PROMPT, *cold, 7, 8, 9], 20).tokens
    for one in (alone, old, heir):
        one.close()
