"""What operators ask: which blocks are held, and whether they are as they should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from forefetch.errors import BadRequest
from forefetch.v1 import kv_pb2 as pb
from kv_service.labels import TAG_BYTES
from kv_service.store_order import Entry
from kv_service.vault import Vault

Entries = dict[bytes, Entry]
MAX_ORIGIN = 4096
"""Most bytes in a description of blocks."""
SHOWN = 1000
EVERY_BYTES = 64 << 20
"""How often Verify says how far it is."""


def remember(vault: Vault, origin: pb.BlockOrigin) -> bytes:
    """The id of a description."""
    text = origin.SerializeToString(deterministic=True)
    if len(text) > MAX_ORIGIN:
        raise BadRequest("origin", f"must be at most {MAX_ORIGIN} bytes, is {len(text)}")
    return vault.labels.origin(text)


def inspect(vault: Vault, request: pb.InspectRequest, sees: Callable[[bytes], bool]) -> Iterator[pb.InspectResponse]:
    """Blocks that the caller may see, chain by chain from its first held block on."""
    entries: Entries = {entry.name: entry for entry in vault.entries() if sees(entry.tag)}
    if request.digest:
        entries = _chain_of(entries, request.digest.lower())
    for entry in _in_order(entries)[: request.limit or SHOWN]:
        yield _shown(vault, entry)


def _chain_of(entries: Entries, start: str) -> Entries:
    """The blocks whose digest begins with `start`, those before and those after them."""
    matches = [entry for entry in entries.values() if entry.name[TAG_BYTES:].hex().startswith(start)]
    wanted = _reached(matches, _followers(entries))
    for entry in matches:
        before = entries.get(entry.parent)
        while before is not None and before.name not in wanted:
            wanted[before.name] = before
            before = entries.get(before.parent)
    return wanted


def _in_order(entries: Entries) -> list[Entry]:
    firsts = [entry for entry in entries.values() if entry.parent not in entries]
    return list(_reached(firsts, _followers(entries)).values())


def _followers(entries: Entries) -> dict[bytes, list[Entry]]:
    followers: dict[bytes, list[Entry]] = {}
    for entry in entries.values():
        followers.setdefault(entry.parent, []).append(entry)
    return followers


def _reached(starts: list[Entry], followers: dict[bytes, list[Entry]]) -> Entries:
    """The blocks of `starts` and all that follow, each chain at a stretch."""
    reached: Entries = {}
    stack = starts[::-1]
    while stack:
        entry = stack.pop()
        reached[entry.name] = entry
        stack += followers.get(entry.name, [])[::-1]
    return reached


def _shown(vault: Vault, entry: Entry) -> pb.InspectResponse:
    tenant, origin, children = vault.describe(entry)
    reply = pb.InspectResponse(
        tenant=tenant,
        key=pb.BlockKey(
            digest=entry.name[TAG_BYTES:],
            parent=entry.parent[TAG_BYTES:],
            token_ids=entry.token_ids,
            position=entry.position,
        ),
        size=entry.size,
        checksum=entry.checksum,
        in_memory=entry.in_memory,
        on_disk=entry.on_disk,
        children=children,
    )
    if origin:
        reply.origin.ParseFromString(origin)
    return reply


def verify(vault: Vault, sees: Callable[[bytes], bool], active: Callable[[], bool]) -> Iterator[pb.VerifyResponse]:
    """Checks what the caller may see; a message for each damaged block, now and then, and at the end."""
    entries = [entry for entry in vault.entries() if sees(entry.tag)]
    so_far, told = pb.VerifyResponse(total=len(entries)), 0
    for entry in entries:
        if not active():
            return
        whole = vault.check(entry)
        so_far.blocks += 1
        so_far.bytes += entry.size
        so_far.damaged += not whole
        if not whole or so_far.bytes - told >= EVERY_BYTES:
            told = so_far.bytes
            message = pb.VerifyResponse()
            message.CopyFrom(so_far)
            message.damaged_digest = b"" if whole else entry.name[TAG_BYTES:]
            yield message
    yield so_far
