"""One generation over several routers: which router to ask next, and for what. Pure: times are arguments.

A request is sent again only where that cannot change its answer: while no token of it was seen, or, with a session, from the
first unseen token on, by resuming the session's answer. What was seen before and after is then one answer without a gap.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from forefetch.errors import ForefetchError, NotFound, Unavailable
from forefetch.v1 import router_pb2

FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 1.0


class Attempts:
    """`request` and `address` are what to send where; after an error ask `again`."""

    def __init__(self, request: router_pb2.GenerateRequest, addresses: Sequence[str], first: int, patience_s: float) -> None:
        """`first`: index of the address to begin with. `patience_s`: seconds without a token after which to give up."""
        self.request = self._original = request
        self._addresses, self._at, self._patience_s = addresses, first, patience_s
        self._seen = request.session.next_index
        self._failures, self._since = 0, 0.0
        self._lost: ForefetchError | None = None
        if request.HasField("session") and not request.request_id:
            request.request_id = uuid.uuid4().hex  # by which its answer is found again

    @property
    def address(self) -> str:
        """The router to ask."""
        return self._addresses[self._at]

    @property
    def index(self) -> int:
        """Its index."""
        return self._at

    def saw(self, token_index: int) -> None:
        """A token has come."""
        self._seen, self._failures = token_index + 1, 0

    def again(self, error: ForefetchError, now: float) -> float:
        """Seconds to wait before `request` goes to `address`. Raises the error when it must not, or was often enough."""
        if self._never_began(error):
            self.request = self._original  # to the router that knows it
            return 0.0
        if self._original.HasField("session"):
            self._resume(error)
        elif not isinstance(error, Unavailable) or self._seen or len(self._addresses) == 1:
            raise error
        if not self._failures:
            self._since = now
        if now - self._since > self._patience_s:
            raise error
        self._failures += 1
        self._at = (self._at + 1) % len(self._addresses)
        rounds = self._failures // len(self._addresses)
        return min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** (rounds - 1)) if rounds else 0.0

    def _never_began(self, error: ForefetchError) -> bool:
        """Whether a router says that the answer that was to be resumed is not there. Raises what was before, if some of it was
        seen: then the session is gone."""
        if not isinstance(error, NotFound) or self._lost is None or self.request is self._original:
            return False
        if self._seen > self._original.session.next_index:
            raise self._lost
        return True

    def _resume(self, error: ForefetchError) -> None:
        """The request that goes on where the stream broke off."""
        if not isinstance(error, Unavailable):
            raise error
        self._lost = error
        params = self._original.session
        answer = params.answer if params.mode == router_pb2.SESSION_MODE_RESUME else self._original.request_id
        self.request = router_pb2.GenerateRequest(
            session=router_pb2.SessionParams(
                id=params.id, mode=router_pb2.SESSION_MODE_RESUME, next_index=self._seen, answer=answer
            )
        )
