"""Events between engine and streams: at once, or when a model begins to compute; never out of order, never left behind."""

from __future__ import annotations

from typing import Any

from forefetch.errors import Cancelled
from router_service.answer import Delivery, FinishOut, TokenOut
from router_service.outgoing import Outgoing
from tests.router_service.test_engine import Rig, make_rig


def test_events_leave_at_once_unless_a_model_says_when() -> None:
    left: list[Delivery] = []
    outgoing, first, second = Outgoing(left.extend), ("a", Cancelled("1")), ("b", Cancelled("2"))
    outgoing.add([first])
    assert left == [first]
    computing = outgoing.until_computing()
    outgoing.add([second])
    outgoing.add([first])
    assert left == [first]
    computing()
    computing()
    assert left == [first, second, first]


def _waiting(prompts: dict[str, int]) -> tuple[Rig, list[list[str]]]:
    """A rig whose events wait for its model, which lets none go by itself; and who had got tokens when each step computed."""
    rig, seen = make_rig(ahead=False), list[list[str]]()
    rig.engine.outgoing.until_computing()
    forward = rig.trunk.forward

    def watched(*args: Any, **more: Any) -> Any:
        seen.append([f"{name}{len(events)}" for name, events in rig.events.items()])
        return forward(*args, **more)

    rig.trunk.forward = watched  # type: ignore[method-assign]
    for name, prompt in prompts.items():
        rig.submit(name, prompt, max_tokens=3)
    return rig, seen


def test_what_waited_is_handed_out_when_no_step_follows() -> None:
    rig, _ = _waiting({"a": 3})
    while rig.engine.step():
        pass
    tokens = [event.token_id for event in rig.events["a"] if isinstance(event, TokenOut)]
    assert tokens == [3, 4, 5]
    assert isinstance(rig.events["a"][-1], FinishOut)


def test_a_step_later_at_the_latest() -> None:
    rig, seen = _waiting({"a": 3, "b": 2})
    while rig.engine.step():
        pass
    assert seen == [["a0", "b0"], ["a0", "b0"], ["a1", "b1"]], (
        "the model let nothing go, so each step's events left behind the next"
    )


def test_an_error_comes_behind_the_tokens_that_wait() -> None:
    rig, _ = _waiting({"a": 3})
    rig.engine.step()
    rig.trunk.broken = [RuntimeError("gone wrong")]
    rig.engine.start()
    rig.engine.stop()
    first, last = rig.events["a"]
    assert isinstance(first, TokenOut)
    assert not isinstance(last, TokenOut | FinishOut)
