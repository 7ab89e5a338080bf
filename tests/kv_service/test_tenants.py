"""Callers of the KV service: what each sees, with tokens and with certificates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from kv_calls import Kv, running

from forefetch import rpc
from forefetch.errors import Unauthenticated
from forefetch.v1 import kv_pb2 as pb
from kv_service.client import Geometry, KvClient, Origin, SessionRecord, chain, root_key
from kv_service.config import KvConfig

TOKENS = {"acme": "acme-token-0123456789", "other": "other-token-0123456789", "ops": "ops-token-0123456789"}
SETTINGS = KvConfig(budget_mb=8, max_block_mb=2)


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    file = tmp_path / "tokens"
    file.write_text("".join(f"{tenant}: {token}\n" for tenant, token in TOKENS.items()))
    return str(file)


@pytest.fixture
def caller() -> Iterator[Callable[..., KvClient]]:
    with ExitStack() as stack:

        def connect(kv: Kv, tenant: str, origin: Origin | None = None) -> KvClient:
            client = KvClient(kv.address, None, lambda: (("authorization", f"Bearer {TOKENS[tenant]}"),), origin)
            stack.callback(client.close)
            return client

        yield connect


def test_every_call_asks_who_it_is(tokens: str) -> None:
    with running(replace(SETTINGS, auth_tokens=tokens)) as kv:
        client, keys = kv.client, kv.keys(1)
        calls: list[Callable[[], object]] = [
            client.describe,
            client.stats,
            lambda: client.put([(keys[0], b"data")]),
            lambda: client.look_up(keys),
            lambda: client.get(keys),
            lambda: client.append_session("s", 1, SessionRecord(0)),
            lambda: client.get_session("s", claim=True),
        ]
        streams = [
            lambda: list(kv.stub.Inspect(pb.InspectRequest(), timeout=60)),
            lambda: list(kv.stub.Verify(pb.VerifyRequest(), timeout=60)),
        ]
        for call in calls:
            with pytest.raises(Unauthenticated):
                call()
        for stream in streams:
            with pytest.raises(Exception, match="UNAUTHENTICATED"):
                stream()
        stats = kv.servicer.stats()
        assert (stats.unauthenticated, stats.blocks, stats.sessions) == (9, 0, 0)


def test_tenants_never_meet(tokens: str, caller: Callable[..., KvClient]) -> None:
    with running(replace(SETTINGS, auth_tokens=tokens)) as kv:
        acme, other, keys = caller(kv, "acme"), caller(kv, "other"), kv.keys(1, 2)
        assert acme.put([(key, b"acme") for key in keys]) == (2, 0)
        acme.append_session("s", 1, SessionRecord(0, (1, 2)))
        assert other.look_up(keys) == 0
        assert other.get(keys) == []
        assert other.get_session("s") is None
        assert other.put([(keys[0], b"others")]) == (1, 0)  # no conflict: not even that says what acme holds
        other.append_session("s", 1, SessionRecord(0, (9,)))
        assert (acme.get(keys), other.get(keys)) == ([b"acme"] * 2, [b"others"])
        assert acme.stats().conflicts == 0
        state = acme.get_session("s")
        assert state is not None
        assert state.token_ids == (1, 2)


def test_a_request_cannot_name_its_tenant(tokens: str, caller: Callable[..., KvClient]) -> None:
    """The salt is the router's: with another tenant's root, or digests, one still looks in one's own namespace."""
    with running(replace(SETTINGS, auth_tokens=tokens)) as kv:
        root = root_key(b"acme", "model", Geometry(2, 2, 8), "rope", "float32", "", 4)
        keys = chain(root, [[1, 2]])
        caller(kv, "acme").put([(keys[0], b"acme")])
        assert caller(kv, "other").get(keys) == []
        metadata = [("tenant", "acme"), ("x-tenant", "acme")]
        assert caller(kv, "other").get(keys, metadata=metadata) == []


def test_tenants_share_when_told_to(tokens: str, caller: Callable[..., KvClient]) -> None:
    with running(replace(SETTINGS, auth_tokens=tokens, share_tenants=True)) as kv:
        keys = kv.keys(1)
        caller(kv, "acme").put([(keys[0], b"data")])
        assert caller(kv, "other").get(keys) == [b"data"]
        with pytest.raises(Unauthenticated):
            kv.client.look_up(keys)


def test_a_tenant_s_share(tokens: str, caller: Callable[..., KvClient]) -> None:
    with running(replace(SETTINGS, auth_tokens=tokens, tenant_share=0.5)) as kv:
        acme, other = caller(kv, "acme"), caller(kv, "other")
        assert other.put([(kv.keys(50)[0], bytes(1 << 20))]) == (1, 0)
        for token in range(10):
            assert acme.put([(kv.keys(token)[0], bytes(1 << 20))]) == (1, 0)
        assert acme.stats().bytes <= 5 << 20
        assert other.look_up(kv.keys(50)) == 1


def test_operators_see_all_and_others_their_own(tokens: str, caller: Callable[..., KvClient]) -> None:
    origin = Origin("ab" * 32, Geometry(2, 2, 8), "default theta=1e6", "e2m0", "outliers=1", 4)
    with running(replace(SETTINGS, auth_tokens=tokens, operators="ops, else")) as kv:
        keys = kv.keys(1, 2)
        caller(kv, "acme", origin).put([(key, b"data") for key in keys])
        caller(kv, "other").put([(keys[0], b"others")])

        def shown(tenant: str, digest: str = "") -> list[tuple[str, int, str]]:
            metadata = (("authorization", f"Bearer {TOKENS[tenant]}"),)
            found = kv.stub.Inspect(pb.InspectRequest(digest=digest), timeout=60, metadata=metadata)
            return [(one.tenant, one.key.position, one.origin.kv_format) for one in found]

        assert shown("acme") == [("acme", 0, "e2m0"), ("acme", 2, "e2m0")]
        assert shown("other") == [("other", 0, "")]
        assert sorted(shown("ops")) == [("acme", 0, "e2m0"), ("acme", 2, "e2m0"), ("other", 0, "")]
        assert shown("acme", keys[1].digest.hex()[:8]) == shown("acme")
        assert shown("acme", "00" * 32) == []


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import trustme

    folder, ca = tmp_path_factory.mktemp("pki"), trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    for name in ("service", "acme", "other"):
        issued = ca.issue_cert("127.0.0.1", common_name=name)
        (folder / f"{name}.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    return folder


def tls(folder: Path, name: str) -> rpc.Tls:
    return rpc.Tls(str(folder / f"{name}.pem"), str(folder / f"{name}.key"), str(folder / "ca.pem"))


@pytest.mark.parametrize("by_name", [True, False])
def test_certificates(pki: Path, by_name: bool) -> None:
    """With --auth-certificates each name is a tenant; without, a certificate lets in and all are one."""
    mine = tls(pki, "service")
    config = replace(SETTINGS, tls_cert=mine.cert, tls_key=mine.key, tls_ca=mine.ca, auth_certificates=by_name)
    with running(config, tls(pki, "acme")) as kv:
        keys = kv.keys(1)
        assert kv.client.put([(keys[0], b"data")]) == (1, 0)
        assert kv.client.get(keys) == [b"data"]
        other = KvClient(kv.address, tls(pki, "other"))
        assert other.get(keys) == ([] if by_name else [b"data"])
        other.close()
        assert [one.tenant for one in kv.stub.Inspect(pb.InspectRequest(), timeout=60)] == ["acme" if by_name else "default"]
