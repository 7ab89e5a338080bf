"""A KV service in this process, and blocks to fill it with."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forefetch import rpc
from forefetch.telemetry.spans import Exporter
from forefetch.v1 import kv_pb2_grpc as pb_grpc
from kv_service.client import Geometry, Key, KvClient, chain, root_key
from kv_service.config import KvConfig
from kv_service.server import SERVICE, THREADS, KvServicer, add_to

ROOT = root_key(b"", "model", Geometry(2, 2, 8), "rope", "float32", "", 4)


@dataclass
class Kv:
    """A running service: its address, a client, and the raw stub for what the client would never send."""

    address: str
    servicer: KvServicer
    client: KvClient
    stub: pb_grpc.KvServiceStub

    def keys(self, *tokens: int) -> list[Key]:
        return chain(ROOT, [[token, token + 1] for token in tokens])

    def block(self, key: Key, size: int = 100) -> bytes:
        """A function of the key, so that any reader can tell whether bytes are right."""
        seed = hashlib.sha256(key.digest + bytes(key.token_ids[0] % 251)).digest()
        return (seed * (size // 32 + 1))[:size]

    def put(self, keys: Sequence[Key], size: int = 100) -> tuple[int, int]:
        return self.client.put([(key, self.block(key, size)) for key in keys])


@contextlib.contextmanager
def running(config: KvConfig, tls: rpc.Tls | None = None) -> Iterator[Kv]:
    """`tls`: as a caller. A config that asks for tokens leaves `client` and `stub` without one."""
    exporter = Exporter(config, "forefetch-kv")
    servicer = KvServicer(config, exporter)
    server = rpc.serve_sync(config, SERVICE, lambda server: add_to(server, servicer), max_workers=THREADS)
    server.set_serving(True)
    client = KvClient(server.address, tls)
    channel = rpc.channel(server.address, tls)
    try:
        yield Kv(server.address, servicer, client, pb_grpc.KvServiceStub(channel))
    finally:
        channel.close()
        client.close()
        server.stop()
        servicer.close()
        exporter.close()
