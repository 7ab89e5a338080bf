"""Two links to one worker as one that carries two calls at a time, for routers that send a step in two halves."""

from __future__ import annotations

from expert_worker.links import Link
from forefetch.errors import Unavailable
from forefetch.hints import ExpertHint
from forefetch.wire import LayerCall, LayerReply


class TwinLink(Link):
    """Calls take turns on two links, which the worker serves as if they were two routers', in the order in which they come.

    Two may be outstanding; they are collected in the order of submission.
    """

    def __init__(self, first: Link, second: Link) -> None:
        """Takes both over. Unavailable when the worker was restarted between them."""
        super().__init__(first.address, first.info)
        self.kind = first.kind
        self._both, self._submitted, self._collected = (first, second), 0, 0
        if first.info.instance_id != second.info.instance_id:
            self.close()
            raise Unavailable("the worker was restarted meanwhile")

    def submit(self, call: LayerCall) -> None:
        """As Link.submit; RuntimeError for a third one."""
        self._both[self._submitted % 2].submit(call)
        self._submitted += 1

    def collect(self, timeout_s: float) -> LayerReply:
        """As Link.collect, of the older call; its rows are valid until the submit after the next."""
        link = self._both[self._collected % 2]
        self._collected += 1
        return link.collect(timeout_s)

    @property
    def alive(self) -> bool:
        """Both are."""
        return all(link.alive for link in self._both)

    def hint(self, hint: ExpertHint) -> None:
        """Over the first."""
        self._both[0].hint(hint)

    @property
    def hints_dropped(self) -> int:
        """By the first."""
        return self._both[0].hints_dropped

    def close(self) -> None:
        """Gives up both."""
        for link in self._both:
            link.close()
