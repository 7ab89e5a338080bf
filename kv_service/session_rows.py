"""Rows of session logs: what stands in one, and what one does to a session.

session (32 bytes) and sequence (8) -> XXH3-64 of key and row, kind, row

record    a SessionRecord            claim     an epoch
snapshot  the epoch of the latest record, and the whole session as one SessionRecord
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator

import lmdb
import xxhash

from forefetch.errors import BadRequest
from forefetch.v1 import kv_pb2 as pb
from kv_service.keys import DIGEST_BYTES
from kv_service.store_sessions import Session, SessionRecord, Verdict

NAME_BYTES = 32
MAX_SESSION_ID = 128
"""Most bytes in a session's name."""
ROW_BYTES = 256
"""What a row costs beside its own bytes, in memory or on disk."""
_RECORD, _CLAIM, _SNAPSHOT = b"R", b"C", b"S"
_U64 = struct.Struct(">Q")


def check_session_id(session_id: str, field: str) -> None:
    """BadRequest unless it is a name that a session may have."""
    size = len(session_id.encode())
    if not 1 <= size <= MAX_SESSION_ID:
        raise BadRequest(field, f"must be 1 to {MAX_SESSION_ID} bytes, is {size}")


def check_record(record: pb.SessionRecord, field: str) -> None:
    """BadRequest naming what is wrong with a record."""
    check_session_id(record.session_id, f"{field}.session_id")
    if record.epoch < 1:
        raise BadRequest(f"{field}.epoch", "must be at least 1")
    if any(len(digest) != DIGEST_BYTES for digest in record.block_digests):
        raise BadRequest(f"{field}.block_digests", f"must be {DIGEST_BYTES} bytes each")
    if record.block_digests and not record.HasField("first_block"):
        raise BadRequest(f"{field}.first_block", "must be set when there are block_digests")


def read_record(record: pb.SessionRecord) -> SessionRecord:
    """Off the wire, or off the disk."""
    return SessionRecord(
        position=record.position,
        token_ids=tuple(record.token_ids),
        first_block=record.first_block if record.HasField("first_block") else None,
        block_digests=tuple(record.block_digests),
        state=record.state if record.HasField("state") else None,
        tail=record.tail if record.HasField("tail") else None,
        tail_position=record.tail_position,
    )


def cost_of(row: bytes) -> int:
    """Bytes that a row counts for."""
    return len(row) + ROW_BYTES


def name_of(tag: bytes, session_id: str) -> bytes:
    """A session's name in the log: the tenant's tag, and a digest of the rest."""
    return tag + hashlib.sha256(session_id.encode()).digest()[: NAME_BYTES - len(tag)]


def snapshot_of(session: Session) -> bytes:
    """The row that stands for all before it."""
    record = pb.SessionRecord(
        epoch=session.epoch,
        token_ids=session.token_ids,
        first_block=0,
        block_digests=session.block_digests,
        state=session.state,
        tail=session.tail,
        tail_position=session.tail_position,
    )
    return _SNAPSHOT + _U64.pack(session.written) + record.SerializeToString()


def replay(session: Session, row: bytes) -> bool:
    """Applies a row; False for one that is damaged or does not follow."""
    kind, body = row[:1], row[1:]
    if kind == _CLAIM:
        session.epoch = _U64.unpack(body)[0]
    elif kind == _RECORD:
        record = pb.SessionRecord.FromString(body)
        new = read_record(record)
        if session.verdict(record.epoch, new) is not Verdict.APPENDED:
            return False
        session.apply(record.epoch, new)
    elif kind == _SNAPSHOT:
        record = pb.SessionRecord.FromString(body[8:])
        session.apply(max(1, record.epoch), read_record(record))
        session.epoch, session.written = record.epoch, _U64.unpack(body[:8])[0]
    else:
        return False
    return True


def rows_of(txn: lmdb.Transaction, name: bytes) -> Iterator[tuple[int, bytes]]:
    """(sequence, row) of a session; b"" for a row that is damaged."""
    cursor = txn.cursor()
    if not cursor.set_range(name):
        return
    for found, value in cursor:
        key, row = bytes(found), bytes(value[8:])
        if not key.startswith(name):
            return
        if len(key) != NAME_BYTES + _U64.size:
            raise lmdb.CorruptedError("a key of another length")
        yield _U64.unpack(key[NAME_BYTES:])[0], row if xxhash.xxh3_64_digest(key + row) == value[:8] else b""


def delete_rows(txn: lmdb.Transaction, name: bytes, sequences: Iterable[int]) -> None:
    """Deletes rows of a session."""
    for sequence in sequences:
        txn.delete(name + _U64.pack(sequence))


def put_row(txn: lmdb.Transaction, name: bytes, sequence: int, row: bytes) -> None:
    """Writes a row with its checksum."""
    key = name + _U64.pack(sequence)
    txn.put(key, xxhash.xxh3_64_digest(key + row) + row)


def record_row(record: pb.SessionRecord) -> bytes:
    """The row of a record."""
    return _RECORD + record.SerializeToString()


def claim_row(epoch: int) -> bytes:
    """The row of a claim."""
    return _CLAIM + _U64.pack(epoch)
