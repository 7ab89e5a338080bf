"""Requests with a session: what the log knows of it, who may write to it, and the request that comes of both."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from forefetch.errors import BadRequest, Mismatch, NotFound, Unavailable
from forefetch.v1 import router_pb2
from kv_service.client import SessionState
from router_service import admission
from router_service.admission import Admitted
from router_service.asking import Reader, request_id
from router_service.journal import Tail, Turn
from router_service.live import Live
from router_service.scheduler import Request
from router_service.sessions import Sessions, name_of

A = TypeVar("A")
R = TypeVar("R")
AWAY = "session.id: the KV service that keeps the session cannot be reached now; without a session requests are served"
UNKNOWN = "session.id: there is no such session"
NOT_WITH_RESUME = ("sampling", "stop", "top_logprobs")


@dataclass(frozen=True)
class Opened:
    """What to run. `known`: tokens of the answer that are there already; `next_index`: the first token to be sent. With a
    session `name`, `epoch` and `turn` say how to log it, from the conversation's `logged` first tokens on."""

    admitted: Admitted
    known: tuple[int, ...] = ()
    next_index: int = 0
    session_id: str = ""
    name: str = ""
    epoch: int = 0
    turn: Turn | None = None
    logged: int = 0
    tail: Tail | None = None


@dataclass(frozen=True)
class Conversations:
    """`sessions` is None without a KV service. `model`: what answers are computed with here; `arithmetic`: in which KV format,
    types and experts."""

    sessions: Sessions | None
    reader: Reader
    model: str
    arithmetic: str

    async def open(self, request: router_pb2.GenerateRequest, tenant: str, left_s: float | None) -> Opened:
        """Checks the request and claims its session, if it has one. Raises BadRequest, NotFound, Mismatch, Unavailable."""
        if not request.HasField("session"):
            return Opened(await self.reader.admit(request))
        params, sessions = request.session, self.sessions
        admission.check_session_id(params.id)
        if sessions is None:
            raise Mismatch("session: this router has no KV service to keep it in")
        name, resume = name_of(tenant, params.id), params.mode == router_pb2.SESSION_MODE_RESUME
        for field in ("next_index", "answer"):
            if getattr(params, field) and not resume:
                raise BadRequest(f"session.{field}", "belongs to SESSION_MODE_RESUME")
        found = await self._call(sessions.find, name, left_s)
        if params.mode == router_pb2.SESSION_MODE_START:
            if found is not None and found.token_ids:
                raise Mismatch(
                    "session.id: the session holds a conversation already; continue or resume it, or take another id"
                )
            return await self._start(request, name, left_s)
        if found is None or not found.token_ids:
            raise NotFound(UNKNOWN)
        return await (self._resume if resume else self._go_on)(request, name, found, left_s)

    async def _start(self, request: router_pb2.GenerateRequest, name: str, left_s: float | None) -> Opened:
        """The session's first turn. Everything that can be wrong with it is found before the session is claimed."""
        admitted = await self.reader.admit(request)
        state = await self._claim(name, left_s)
        if state.token_ids:
            raise Mismatch("session.id: the session is being used by another request")
        return self._turn(request, name, admitted, state)

    async def _go_on(self, request: router_pb2.GenerateRequest, name: str, found: SessionState, left_s: float | None) -> Opened:
        """A turn behind what the session holds, checked before it is claimed as well. If somebody wrote meanwhile, it follows
        that: whoever did has lost the session by now, and of two who come at once one is to be served."""
        admitted = await self._following(request, found)
        state = await self._claim(name, left_s)
        if state.token_ids != found.token_ids:
            admitted = await self._following(request, state)
        return self._turn(request, name, admitted, state, self._tail(state))

    async def _following(self, request: router_pb2.GenerateRequest, state: SessionState) -> Admitted:
        self._same_model(Turn.decode(state.state))
        return await self.reader.admit(request, state.token_ids)

    def _turn(
        self,
        request: router_pb2.GenerateRequest,
        name: str,
        admitted: Admitted,
        state: SessionState,
        tail: Tail | None = None,
    ) -> Opened:
        turn = Turn.of(self.model, self.arithmetic, admitted)
        return Opened(admitted, (), 0, request.session.id, name, state.epoch, turn, len(state.token_ids), tail)

    async def _resume(
        self, request: router_pb2.GenerateRequest, name: str, found: SessionState, left_s: float | None
    ) -> Opened:
        if form := request.WhichOneof("prompt"):
            raise BadRequest(form, "must be unset with SESSION_MODE_RESUME: the answer goes on from the session")
        for field in NOT_WITH_RESUME:
            if request.HasField(field):
                raise BadRequest(field, "must be unset with SESSION_MODE_RESUME: the answer goes on as it began")
        self._answer(found, request)  # so that what is refused takes the session from nobody
        state = await self._claim(name, left_s)
        admitted, turn, known = self._answer(state, request)
        logged = turn.prompt + len(known)
        next_index, session_id, tail = request.session.next_index, request.session.id, self._tail(state)
        return Opened(admitted, known, next_index, session_id, name, state.epoch, turn, logged, tail)

    def _answer(self, state: SessionState, request: router_pb2.GenerateRequest) -> tuple[Admitted, Turn, tuple[int, ...]]:
        """The request that began the last turn, and the tokens of its answer that need not be generated again."""
        turn, limit = Turn.decode(state.state), self.reader.limits.context
        self._same_model(turn)
        if request.session.answer not in ("", turn.request_id):
            raise NotFound("session.answer: the session's last answer is another one")
        if turn.arithmetic != self.arithmetic:
            raise Mismatch(f"session.id: its answer was begun in {turn.arithmetic}; this router computes in {self.arithmetic}")
        if turn.prompt + turn.max_tokens > limit:
            raise Mismatch(
                f"session.id: its answer may reach {turn.prompt + turn.max_tokens} tokens; this router's context is {limit}"
            )
        known, wanted = state.token_ids[turn.prompt :], request.session.next_index
        most = len(known) if turn.reason else turn.max_tokens
        if wanted > most:
            raise BadRequest("session.next_index", f"is {wanted}; the answer has at most {most} tokens")
        if turn.sampling.top_logprobs is not None:  # the log has ids only: what is still to be sent is generated again
            known, turn = known[:wanted], replace(turn, reason="", stop_string="")
        admission.check_request_id(request.request_id)
        return turn.admitted(state.token_ids[: turn.prompt], request_id(request)), turn, known

    def _tail(self, state: SessionState) -> Tail | None:
        """The log's tail, if it was computed as here."""
        same = Turn.decode(state.state).arithmetic == self.arithmetic
        return Tail.decode(state.tail_position, state.tail) if same else None

    def _same_model(self, turn: Turn) -> None:
        if turn.model != self.model:
            raise Mismatch("session.id: the session was begun with another model")

    async def _claim(self, name: str, left_s: float | None) -> SessionState:
        assert self.sessions is not None
        return await self._call(self.sessions.claim, name, left_s)

    def prepare(self, opened: Opened, request: Request) -> Live | None:
        """What follows the request's answer; None without a session."""
        if self.sessions is None or opened.turn is None:
            return None
        return self.sessions.prepare(opened.name, opened.epoch, request, opened.turn, opened.logged)

    async def follow(self, live: Live | None, left_s: float | None) -> None:
        """Writes the turn's beginning."""
        if self.sessions is not None and live is not None:
            await self._call(self.sessions.open, live, left_s)

    async def _call(self, method: Callable[[A, float], R], what: A, left_s: float | None) -> R:
        """A call that waits, off the event loop."""
        assert self.sessions is not None
        timeout_s = math.inf if left_s is None else max(left_s, 0.0)
        try:
            return await asyncio.get_running_loop().run_in_executor(self.sessions.pool, method, what, timeout_s)
        except Unavailable:  # its text is about addresses that are no caller's business
            raise Unavailable(AWAY) from None

    async def finish(self, live: Live, opened: Opened, reason: str, stop_string: str) -> router_pb2.SessionStatus:
        """Waits until the log has the whole answer, or is known not to get it."""
        assert self.sessions is not None
        saved = await asyncio.wrap_future(self.sessions.finish(live, reason, stop_string))
        return router_pb2.SessionStatus(
            id=opened.session_id, tokens=len(live.request.tokens), saved=saved, resumed_tokens=len(opened.known)
        )

    def leave(self, live: Live | None) -> None:
        """The stream is over, complete or not."""
        if live is not None and self.sessions is not None:
            self.sessions.leave(live)
