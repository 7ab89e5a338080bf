"""TLS on one and on both sides, certificates that rotate, and files that cannot be read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from rpc_servers import serving

from forefetch import rpc
from forefetch.errors import ConfigError
from forefetch.settings import ServiceConfig


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and NAME.pem + NAME.key for "server", "renewed" and "client"; "stranger" has another authority."""
    import trustme

    folder = tmp_path_factory.mktemp("pki")
    ca, other = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    for name in ("server", "renewed", "client", "stranger"):
        issued = (other if name == "stranger" else ca).issue_cert("127.0.0.1", common_name=name)
        (folder / f"{name}.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    return folder


def tls_config(folder: Path, name: str = "server") -> ServiceConfig:
    return ServiceConfig(
        tls_cert=str(folder / f"{name}.pem"), tls_key=str(folder / f"{name}.key"), tls_ca=str(folder / "ca.pem")
    )


def test_mutual_tls(kind: str, pki: Path) -> None:
    mutual = rpc.tls_of(tls_config(pki, "client"))
    with serving(kind, tls_config(pki)) as server:
        with server.stub(mutual) as stub:
            assert stub.ids("hello") == [0] * 5
        for refused in (None, rpc.Tls(ca=str(pki / "ca.pem")), rpc.tls_of(tls_config(pki, "stranger")), replace(mutual, ca="")):
            with server.stub(refused) as stub, pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                stub.ids("hello")


def test_server_tls_alone(kind: str, pki: Path) -> None:
    with serving(kind, replace(tls_config(pki), tls_ca="")) as server, server.stub(rpc.Tls(ca=str(pki / "ca.pem"))) as stub:
        assert stub.ids("hi") == [0] * 2


def test_certificates_rotate_without_a_restart(pki: Path, tmp_path: Path) -> None:
    import ssl

    def install(name: str) -> None:
        for end in ("pem", "key"):
            (tmp_path / f"server.{end}").write_bytes((pki / f"{name}.{end}").read_bytes())

    def presented(address: str) -> str:
        host, _, port = address.rpartition(":")
        return ssl.get_server_certificate((host, int(port)), timeout=60)

    install("server")
    config = replace(tls_config(tmp_path), tls_ca="")
    with serving("sync", config) as server:
        before = presented(server.address)
        (tmp_path / "server.pem").write_bytes(b"half a")
        assert presented(server.address) == before
        install("renewed")
        assert presented(server.address) != before
        with server.stub(rpc.Tls(ca=str(pki / "ca.pem"))) as stub:
            assert stub.ids("hi") == [0] * 2


def test_unreadable_pem_files_name_their_flag(kind: str, pki: Path, tmp_path: Path) -> None:
    for field in ("tls_cert", "tls_key", "tls_ca"):
        config = replace(tls_config(pki), **{field: str(tmp_path / "none")})
        with (
            pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}: cannot read the file: No such file"),
            serving(kind, config),
        ):
            pass
    assert rpc.tls_of(ServiceConfig()) is None
