"""What calls of the KV service give. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kv_service.store_sessions import Verdict


@dataclass(frozen=True)
class KvInfo:
    """What a KV service says of itself. `instance_id` changes with every start of the process; `shm_domain` is the caller's own
    where both can map the same memory."""

    instance_id: str
    budget_bytes: int
    max_block_bytes: int
    version: str
    shm_domain: str = ""


@dataclass(frozen=True)
class SessionAck:
    """What became of a record, and the session as it is now: its epoch, tokens and sealed blocks."""

    verdict: Verdict
    epoch: int
    tokens: int
    blocks: int


@dataclass(frozen=True)
class SessionState:
    """A session: every record so far added up. `epoch` is the caller's when it claimed the session."""

    epoch: int
    token_ids: tuple[int, ...]
    block_digests: tuple[bytes, ...]
    state: bytes
    tail: bytes
    tail_position: int
