"""Conversations that outlive this router: their logs at the KV services, written in the background while answers grow.

The engine's thread does nothing for this: a request's list of tokens only ever grows, and one thread reads it every `lag_s`
seconds and appends what is new of all sessions in one call per service. So the log is at most `lag_s` and one call behind the
stream, which costs a router that goes on with the answer so many tokens to generate again, to the same ids. A turn's
beginning is in the log before its first token is computed, and its end before its finish event is sent.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic

from forefetch.errors import ForefetchError, Mismatch, StaleEpoch
from forefetch.priority import give_way
from forefetch.rpc.auth import ANONYMOUS
from kv_service.client import CALL_S, SessionAck, SessionRecord, SessionState, Verdict
from router_service.journal import Cursor, Turn
from router_service.live import Live
from router_service.replicas import Replica, Replicas
from router_service.scheduler import Request

_log = logging.getLogger(__name__)
THREADS = 8
"""Calls that users wait for, at a time."""
END_S = 10.0
"""How long the end of an answer is tried to be written while its KV service is away."""
RECORDS = 256
"""Most records in a call."""
TAKEN = "session.id: the session was taken over by another request"


def name_of(tenant: str, session_id: str) -> str:
    """What the services know a session by: tenants never meet. At most 113 characters."""
    return f"{hashlib.sha256(tenant.encode()).hexdigest()[:16]}/{session_id}" if tenant != ANONYMOUS else session_id


@dataclass
class Counts:
    """Since start."""

    records: int = 0
    tails: int = 0
    failures: Counter[str] = field(default_factory=Counter)


class Sessions:
    """`fence(request, error)` ends a request whose session was taken over; called from the writing thread."""

    def __init__(self, replicas: Replicas, lag_s: float, tail_bytes_s: float = 0.0) -> None:
        """`tail_bytes_s`: most bytes of tails that are written, per second; 0: none are."""
        self.counts = Counts()
        self.fence: Callable[[Request, ForefetchError], None] = lambda request, error: None
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kv-session")
        self._replicas, self.lag_s = replicas, lag_s
        self._tail_bytes_s, self._allowance, self._tail_bytes = tail_bytes_s, 0.0, 0
        self._wanted: deque[Live] = deque()
        self._live: dict[Live, None] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._writer = threading.Thread(target=self._write_loop, name="kv-log", daemon=True)
        self._writer.start()

    @property
    def live(self) -> int:
        """Answers that are followed now."""
        return len(self._live)

    # ---- the engine's thread ----

    def wanting(self) -> list[Live]:
        """Answers of which a snapshot is wanted, each reported once."""
        return [self._wanted.popleft() for _ in range(len(self._wanted))]

    # ---- the API's side: calls that wait are made on `pool` ----

    def find(self, name: str, timeout_s: float) -> SessionState | None:
        """The session as its log has it."""
        return self._replicas.of_session(name).client.get_session(name, timeout_s=min(CALL_S, timeout_s))

    def claim(self, name: str, timeout_s: float) -> SessionState:
        """Takes the session over, or begins it: whoever had it cannot write to it any more."""
        state = self._replicas.of_session(name).client.get_session(name, claim=True, timeout_s=min(CALL_S, timeout_s))
        assert state is not None
        return state

    def prepare(self, name: str, epoch: int, request: Request, turn: Turn, tokens: int) -> Live:
        """An answer to be followed once its beginning is in the log, which holds the conversation's first `tokens`."""
        return Live(name, epoch, self._replicas.of_session(name), request, Cursor(turn, tokens))

    def open(self, live: Live, timeout_s: float) -> None:
        """Writes the turn's beginning and follows the answer from now on. Raises what the call raises: StaleEpoch when somebody
        else claimed the session meanwhile."""
        record = live.cursor.next(live.request.tokens, SessionRecord)
        assert record is not None
        try:
            live.replica.client.append_session(live.name, live.epoch, record, min(CALL_S, timeout_s))
        except StaleEpoch:
            raise StaleEpoch(TAKEN) from None
        live.cursor.appended(record)
        with self._changed:
            self.counts.records += 1
            if live.ended is None:  # else the caller has gone meanwhile
                self._live[live] = None
                self._changed.notify_all()

    def finish(self, live: Live, reason: str, stop_string: str) -> Future[bool]:
        """The answer is complete; the result says whether the log has it."""
        with self._changed:
            live.cursor.end(reason, stop_string)
        return self.leave(live)

    def leave(self, live: Live) -> Future[bool]:
        """Nothing more will come: written at once and followed no longer. No effect the second time."""
        with self._changed:
            if live.ended is None:
                live.ended = monotonic()
            self._changed.notify_all()
        return live.saved

    def close(self) -> None:
        """Writes what there is, once, and ends the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._writer.join(2 * CALL_S)
        self.pool.shutdown(wait=True, cancel_futures=True)

    # ---- the writing thread ----

    def _write_loop(self) -> None:
        give_way()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._live)
                self._changed.wait_for(lambda: self._closing or any(live.urgent for live in self._live), self.lag_s)
                lives, closing = list(self._live), self._closing
            try:
                wrote = self._write(lives)
            except Exception:
                _log.exception("sessions could not be written")
                wrote = False
            for live in lives:
                if live.ended is not None:
                    self._settle(live, live.ended)
            self._want_tails(lives, monotonic())
            if closing:
                for live in lives:
                    self._drop(live, "unavailable")
                return
            if not wrote:  # a service is away: what has ended must not make this a busy loop
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, self.lag_s)

    def _want_tails(self, lives: list[Live], now: float) -> None:
        """Asks the engine for snapshots, the oldest tails first, as the allowed bytes per second let it."""
        if not self._tail_bytes_s:
            return
        # What was not used is not saved up, but a tail larger than a round's share must come some time.
        self._allowance = min(self._allowance + self._tail_bytes_s * self.lag_s, max(self._tail_bytes_s, self._tail_bytes))
        for live in sorted(lives, key=lambda live: live.asked):
            news = live.ended is None and live.snapshot is None and live.request.computed > live.covered
            if not news or live in self._wanted:
                continue
            if self._allowance < self._tail_bytes:
                break
            self._allowance -= self._tail_bytes
            live.asked = now
            self._wanted.append(live)

    def _write(self, lives: list[Live]) -> bool:
        """One round for all; False when a service could not be reached."""
        whose: defaultdict[Replica, list[Live]] = defaultdict(list)
        for live in lives:
            whose[live.replica].append(live)
        fine = True
        for replica, mine in whose.items():
            for first in range(0, len(mine), RECORDS):
                fine = self._append(replica, mine[first : first + RECORDS]) and fine
            for live in mine:
                fine = (live.snapshot is None or self._append_tail(replica, live)) and fine
        return fine

    def _append_tail(self, replica: Replica, live: Live) -> bool:
        """A record of its own, because a tail may be large. One that is not taken is not tried again: a newer one follows."""
        snapshot, live.snapshot = live.snapshot, None
        if snapshot is None or live not in self._live or snapshot.end >= live.cursor.tokens:
            return True
        tail = snapshot.tail()
        self._tail_bytes = max(len(tail.data), self._tail_bytes * 3 // 4)
        record = SessionRecord(position=live.cursor.tokens, tail=tail.encode(), tail_position=tail.start)
        try:
            (ack,) = replica.client.append_sessions([(live.name, live.epoch, record)], CALL_S)
        except ForefetchError as error:
            _log.debug("a session's tail could not be written: %s", error)
            return False
        self._acknowledged(live, record, ack)
        if ack.verdict is Verdict.APPENDED:
            self.counts.tails += 1
            live.covered = snapshot.end
        return True

    def _append(self, replica: Replica, lives: list[Live]) -> bool:
        with self._changed:
            wanted = [(live, live.cursor.next(live.request.tokens, SessionRecord)) for live in lives]
        records = [(live, record) for live, record in wanted if record is not None]
        fine = True
        try:
            sent = [(live.name, live.epoch, record) for live, record in records]
            acks = replica.client.append_sessions(sent, CALL_S) if sent else []
            for (live, record), ack in zip(records, acks, strict=True):
                self._acknowledged(live, record, ack)
                fine = fine and ack.verdict is not Verdict.NO_ROOM
        except ForefetchError as error:
            _log.debug("sessions could not be written: %s", error)
            fine = False
        return fine

    def _acknowledged(self, live: Live, record: SessionRecord, ack: SessionAck) -> None:
        if ack.verdict is Verdict.APPENDED:
            self.counts.records += 1
            with self._changed:
                live.cursor.appended(record)
        elif ack.verdict is Verdict.GAP:
            with self._changed:
                live.cursor.gap(ack)
        elif ack.verdict is Verdict.STALE_EPOCH:
            self._drop(live, "stale")
            self.fence(live.request, Mismatch(TAKEN))
        elif ack.verdict is Verdict.CONFLICT:
            self._drop(live, "conflict")
        # NO_ROOM: room may be made; tried again until the answer has ended

    def _settle(self, live: Live, ended: float) -> None:
        """Lets go of an answer that has ended, once the log has it or it was tried for long enough."""
        with self._changed:
            complete = live.cursor.next(live.request.tokens, SessionRecord) is None
        if complete:
            self._drop(live, "")
        elif monotonic() - ended > END_S:
            self._drop(live, "unavailable")

    def _drop(self, live: Live, failure: str) -> None:
        with self._changed:
            if self._live.pop(live, live) is live:  # gone already
                return
        if failure:
            self.counts.failures[failure] += 1
        live.saved.set_result(not failure)
