"""Sessions and their write-ahead log. Thread-safe.

Each session's records are rows of one LMDB file (`session_rows.py`). A call's rows are one transaction, synced before the call
is answered. A log much longer than its session is replaced by a snapshot. A session with a damaged row is dropped whole: half
a conversation would be a wrong one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import lmdb

from forefetch.errors import NotFound, Overloaded
from forefetch.v1 import kv_pb2 as pb
from kv_service.disk import open_env
from kv_service.session_rows import (
    NAME_BYTES,
    claim_row,
    cost_of,
    delete_rows,
    name_of,
    put_row,
    read_record,
    record_row,
    replay,
    rows_of,
    snapshot_of,
)
from kv_service.store_sessions import SESSION_BYTES, Session, Verdict, memory_of

_log = logging.getLogger(__name__)
COMPACT_BYTES = 64 << 10
"""A log is compacted when it is longer than four times its session and this."""
DROPS = 8
"""Most idle sessions dropped on the way to answering a call: each is a transaction."""


@dataclass(slots=True)
class _Log:
    """A session, how long its log is, what it counts for in the budget, and when it was last used."""

    session: Session = field(default_factory=Session)
    bytes: int = 0
    counted: int = 0
    sequence: int = 0
    first: int = 0  # sequence of the oldest row
    used: float = 0.0


@dataclass(slots=True)
class SessionCounters:
    """Since start; the meanings are those of GetStats."""

    session_records: int = 0
    stale_epochs: int = 0
    sessions_refused: int = 0
    sessions_dropped: int = 0


class SessionLogs:
    """`folder` None: in memory only. `budget_bytes`: of all logs. `idle_s`: a session not used for so long is dropped.
    `epoch`: none that was given before, by a process before this one for a session that is gone, is above it. A router that had
    a session which is gone, and begun anew by another, would else hold that one's epoch."""

    def __init__(
        self,
        budget_bytes: int,
        idle_s: float,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        epoch: int = 0,
    ) -> None:
        self.counters = SessionCounters()
        self.bytes = self.damaged = 0
        self._epoch = epoch  # the highest of a session that is gone
        self._coming = 0  # bytes for which the running call has made room
        self._budget, self._idle_s, self._clock = budget_bytes, idle_s, clock
        self._logs: OrderedDict[bytes, _Log] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self._env: lmdb.Environment | None = None
        if folder is not None:
            self._env, aside = open_env(folder / "sessions", 4 * budget_bytes + COMPACT_BYTES * 64, self._load)
            self.damaged += aside

    def __len__(self) -> int:
        return len(self._logs)

    def close(self) -> None:
        """Frees the file."""
        if self._env is not None:
            self._env.close()

    def append(self, tag: bytes, records: Iterable[pb.SessionRecord]) -> list[tuple[Verdict, Session]]:
        """Applies records one after the other; with a disk, what is APPENDED is there when this returns."""
        with self._lock:
            self._drop_idle()
            outcomes: list[tuple[bytes, Verdict]] = []
            rows: dict[bytes, list[bytes]] = {}
            self._coming = 0
            for record in records:
                name = name_of(tag, record.session_id)
                verdict = self._take(name, record, rows)
                outcomes.append((name, verdict))
            if not self._write(rows):
                outcomes = [(name, Verdict.NO_ROOM if v is Verdict.APPENDED else v) for name, v in outcomes]
            for _, verdict in outcomes:
                self._count(verdict)
            return [(verdict, self._peek(name)) for name, verdict in outcomes]

    def get(self, tag: bytes, session_id: str, claim: bool) -> Session:
        """The session; claimed: under a new epoch, and begun if there was none. Not to be changed. Raises NotFound."""
        with self._lock:
            self._drop_idle()
            name = name_of(tag, session_id)
            if name not in self._logs and not claim:
                raise NotFound("no such session")
            if claim and not self._claim(name):
                raise Overloaded("the session log has no room", retry_after_s=1.0)
            return _copy(self._use(name).session)

    # ---- inside ----

    def _claim(self, name: bytes) -> bool:
        """Raises the session's epoch. False: there is no room, and it is as before."""
        self._coming = 0
        known = self._logs.get(name)
        epoch = 1 + (known.session.epoch if known else self._epoch)
        row = claim_row(epoch)
        if not self._make_room(cost_of(row) if known else SESSION_BYTES, {name}):
            return False
        self._use(name).session.epoch = epoch
        return self._write({name: [row]})

    def _take(self, name: bytes, record: pb.SessionRecord, rows: dict[bytes, list[bytes]]) -> Verdict:
        known, new = self._logs.get(name), read_record(record)
        verdict = (known.session if known else Session()).verdict(record.epoch, new)
        if verdict is not Verdict.APPENDED:
            return verdict
        row = record_row(record)
        held = memory_of(new.token_ids, new.block_digests, new.state, new.tail) + (0 if known else SESSION_BYTES)
        if len(row) > self._budget // 4 or not self._make_room(max(cost_of(row), held), {name, *rows}):
            return Verdict.NO_ROOM
        log = self._use(name)
        log.session.apply(record.epoch, new)
        rows.setdefault(name, []).append(row)
        return verdict

    def _use(self, name: bytes) -> _Log:
        log = self._logs.setdefault(name, _Log())
        log.used = self._clock()
        self._logs.move_to_end(name)
        return log

    def _peek(self, name: bytes) -> Session:
        log = self._logs.get(name)
        return log.session if log else Session()

    def _count(self, verdict: Verdict) -> None:
        self.counters.session_records += verdict is Verdict.APPENDED
        self.counters.stale_epochs += verdict is Verdict.STALE_EPOCH
        self.counters.sessions_refused += verdict is Verdict.NO_ROOM

    def _make_room(self, nbytes: int, keep: set[bytes]) -> bool:
        """Drops sessions until there is room for so many bytes more, beside those for which this call has made room."""
        while self.bytes + self._coming + nbytes > self._budget:
            oldest = next((name for name in self._logs if name not in keep), None)
            if oldest is None or not self._drop(oldest):
                return False
        self._coming += nbytes
        return True

    def _drop_idle(self) -> None:
        limit = self._clock() - self._idle_s
        for _ in range(DROPS):
            oldest = next(iter(self._logs), b"")
            if not oldest or self._logs[oldest].used >= limit or not self._drop(oldest):
                return

    def _drop(self, name: bytes) -> bool:
        """False when the disk fails: what stays there would come back."""
        log = self._logs[name]
        try:
            if self._env is not None:
                with self._env.begin(write=True) as txn:
                    delete_rows(txn, name, range(log.first, log.sequence))
        except lmdb.Error as error:
            _log.error("a session cannot be dropped: %s", error)
            return False
        self._epoch = max(self._epoch, log.session.epoch)
        self.bytes -= log.counted
        self.counters.sessions_dropped += 1
        del self._logs[name]
        return True

    def _write(self, rows: dict[bytes, list[bytes]]) -> bool:
        """Rows of applied records into the log. False: none of them is there, and the sessions are as before."""
        try:
            if self._env is None:
                for name, new in rows.items():
                    self._grow(None, self._logs[name], name, new)
            elif rows:
                with self._env.begin(write=True) as txn:
                    for name, new in rows.items():
                        self._grow(txn, self._logs[name], name, new)
        except lmdb.Error as error:
            _log.error("session records are not on disk: %s", error)
            for name in rows:
                self._reload(name)
            return False
        return True

    def _grow(self, txn: lmdb.Transaction | None, log: _Log, name: bytes, rows: Sequence[bytes]) -> None:
        size = sum(map(cost_of, rows))
        if log.bytes + size > 4 * log.session.bytes + COMPACT_BYTES:
            rows = [snapshot_of(log.session)]
            if txn is not None:
                delete_rows(txn, name, range(log.first, log.sequence))
            log.bytes, log.first, size = 0, log.sequence, cost_of(rows[0])
        for row in rows:
            if txn is not None:
                put_row(txn, name, log.sequence, row)
            log.sequence += 1
        log.bytes += size
        self._count_bytes(log)

    def _count_bytes(self, log: _Log) -> None:
        before, log.counted = log.counted, max(log.bytes, log.session.memory)
        self.bytes += log.counted - before

    def _load(self, env: lmdb.Environment) -> None:
        self._env, self.bytes, self.damaged = env, 0, 0
        self._logs.clear()
        with env.begin() as txn:
            names = [key[:NAME_BYTES] for key, _ in txn.cursor()]
        for name in OrderedDict.fromkeys(names):
            self._reload(name)

    def _reload(self, name: bytes) -> None:
        """The session as its rows have it; without rows there is none."""
        before = self._logs.pop(name, None)
        self.bytes -= before.counted if before else 0
        if self._env is None:
            return
        log, whole = _Log(used=self._clock()), True
        with self._env.begin() as txn:
            for at, (sequence, row) in enumerate(rows_of(txn, name)):
                log.first, log.sequence = (sequence if at == 0 else log.first), sequence + 1
                log.bytes += cost_of(row)
                whole = whole and replay(log.session, row)
        if not log.sequence:
            return
        self._logs[name] = log
        self._count_bytes(log)
        if not whole:
            _log.error("a session is dropped: its log is damaged")
            self.damaged += 1
            if not self._drop(name):  # half a conversation is none; the next start tries again
                log.session = Session()
                self._count_bytes(log)


def _copy(session: Session) -> Session:
    tokens, digests = session.token_ids[:], list(session.block_digests)
    return Session(session.epoch, session.written, tokens, digests, session.state, session.tail, session.tail_position)
