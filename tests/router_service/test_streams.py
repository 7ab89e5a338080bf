"""Every stream ends, once, whatever fails while it is ended."""

from __future__ import annotations

from typing import Any

import pytest
from waiting import until

from forefetch.errors import ForefetchError, Unavailable
from router_service.scheduler import Request
from tests.router_service.test_engine import make_rig


class BrokenKv:
    """A KV side that fails whenever a request ends."""

    def on_change(self, wake: Any) -> None:
        pass

    def settle(self) -> list[Request]:
        return []

    def admitted(self, request: Request, trace: Any) -> None:
        pass

    def computed(self, plan: Any, total_ns: int) -> None:
        pass

    def sealed(self, request: Request, first: int, blocks: int, trace: Any) -> None:
        pass

    def ended(self, request: Request) -> None:
        raise RuntimeError("no rows")


def test_a_kv_side_that_fails_ends_no_stream_and_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    """As on a GPU whose context is broken: rows of the cache can be read no more."""
    rig = make_rig(ahead=False)
    rig.engine.parts.kv = BrokenKv()  # type: ignore[assignment]
    rig.engine.start()
    rig.submit("a")
    assert rig.result("a")[0] == [3, 4, 5, 6]
    rig.trunk.broken = [RuntimeError("illegal memory access")]
    rig.submit("b")
    assert type(rig.result("b")[1]) is ForefetchError
    rig.submit("c")
    assert rig.result("c")[0] == [3, 4, 5, 6]
    rig.engine.stop()
    assert "the KV side" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_ended() -> None:
    rig = make_rig(ahead=False)
    rig.workers.complete = False
    for name in ("a", "b", "c"):
        rig.submit(name)
    rig.engine.parts.recorder.finished = None  # type: ignore[assignment]  # what ends requests is broken itself
    rig.engine.worker_grace_s = 0.0
    rig.engine.start()
    for name in ("a", "b", "c"):
        assert isinstance(rig.result(name)[1], ForefetchError)
    until(lambda: not rig.engine.running)
    with pytest.raises(Unavailable):
        rig.submit("d")
    assert not rig.engine.ready
    rig.engine.stop()
