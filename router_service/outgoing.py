"""A step's events on their way to the streams, let go when the engine's thread needs neither Python nor its lock."""

from __future__ import annotations

from collections.abc import Callable

from router_service.answer import Delivery


class Outgoing:
    """`deliver` hands events to the streams' side, whose thread then works through them with the GIL.

    While a step is scheduled and put together that would be in the way: the engine's thread would wait for the GIL at each call
    that gives it up. A model that computes for long without it says so (`until_computing`), and events leave as it begins.
    Whoever owns this lets them go in any case when no step follows.
    """

    def __init__(self, deliver: Callable[[list[Delivery]], None]) -> None:
        self._deliver, self._waits = deliver, False
        self._events: list[Delivery] = []

    def add(self, deliveries: list[Delivery]) -> None:
        """Events in order. They leave at once, unless they wait for a model."""
        self._events += deliveries
        if not self._waits:
            self.release()

    def until_computing(self) -> Callable[[], None]:
        """From now on events wait until this is called, which a model does in each step, before it computes."""
        self._waits = True
        return self.release

    def release(self) -> None:
        """What has been added goes to the streams."""
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)
