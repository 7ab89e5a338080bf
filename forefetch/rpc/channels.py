"""Channels, TLS, and the transport options that both ends must agree on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from forefetch.errors import ConfigError
from forefetch.settings import ServiceConfig

MESSAGE_LIMIT = 64 << 20
"""Most bytes in one message, both ways (gRPC's default is 4 MiB)."""
METADATA_LIMIT = 64 << 10
"""Most bytes of metadata (gRPC's default is 16 KiB, less than a rich error may need)."""
KEEPALIVE_MS = 10_000
"""A side that heard nothing for this long asks whether the other is still there; 5 s without an answer end the connection."""

Options = list[tuple[str, Any]]

# The only calls that may be sent twice by the transport: unary and free of effects.
_IDEMPOTENT = {
    "forefetch.v1.RouterService": ("Tokenize", "Describe", "GetStats", "GetTrace"),
    "forefetch.v1.ExpertService": ("Describe", "GetStats"),
    "forefetch.v1.KvService": ("Describe", "LookUp", "GetStats"),
}
_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [
                    {"service": service, "method": method} for service, methods in _IDEMPOTENT.items() for method in methods
                ],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.05s",
                    "maxBackoff": "0.5s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)


def transport_options(most_bytes: int = MESSAGE_LIMIT) -> Options:
    """Options of both ends. `most_bytes`: of a message that is received."""
    return [
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.max_send_message_length", MESSAGE_LIMIT),
        ("grpc.max_metadata_size", METADATA_LIMIT),
        ("grpc.absolute_max_metadata_size", 2 * METADATA_LIMIT),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", 5_000),
        # A stream may be silent for as long as it likes: pings without data in between are not limited.
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options() -> Options:
    """Options of a client."""
    return [
        *transport_options(),
        ("grpc.service_config", _SERVICE_CONFIG),
        # A peer that comes back is found within a second, not within gRPC's two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # The least time that an attempt gets, TLS handshake included; a refused one ends at once all the same.
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Each channel has its own connection: a bulk transfer must not queue in front of another channel's small frames.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(most_bytes: int = MESSAGE_LIMIT) -> Options:
    """Options of a server."""
    return [
        *transport_options(most_bytes),
        # The widely copied "min_recv_ping_interval..." is ignored; with it a silent stream dies after a few pings.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        # Without it two servers share a port silently and each gets half of the calls.
        ("grpc.so_reuseport", 0),
    ]


@dataclass(frozen=True)
class Tls:
    """PEM files: this side's certificate chain, its key, and the authority that signs peers ("" = not given).

    A server needs `cert` and `key`; with `ca` it demands a certificate from its callers. A client checks the server against
    `ca` (the system's authorities without it) and presents `cert` when it has one.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """The bytes of (cert, key, ca), None where not given. Raises ConfigError naming the flag."""
        return _pem("cert", self.cert), _pem("key", self.key), _pem("ca", self.ca)

    def _stamp(self) -> tuple[int, ...]:
        return tuple(os.stat(path).st_mtime_ns for path in (self.cert, self.key, self.ca) if path)


def _pem(name: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--tls-{name}: cannot read the file: {error.strerror}") from None


def tls_of(config: ServiceConfig) -> Tls | None:
    """TLS as the settings say, None for plaintext."""
    if not config.tls_cert and not config.tls_ca:
        return None
    return Tls(config.tls_cert, config.tls_key, config.tls_ca)


def channel(address: str, tls: Tls | None = None, options: Options | None = None) -> grpc.Channel:
    """A channel to host:port; it connects on the first call and again after a loss. `options` override the defaults."""
    merged = [*channel_options(), *(options or [])]
    if tls is None:
        return grpc.insecure_channel(address, merged)
    return grpc.secure_channel(address, _client_credentials(tls), merged)


def aio_channel(address: str, tls: Tls | None = None, options: Options | None = None) -> grpc.aio.Channel:
    """`channel` for asyncio; call it inside a running loop."""
    merged = [*channel_options(), *(options or [])]
    if tls is None:
        return grpc.aio.insecure_channel(address, merged)
    return grpc.aio.secure_channel(address, _client_credentials(tls), merged)


def _client_credentials(tls: Tls) -> grpc.ChannelCredentials:
    cert, key, ca = tls.read()
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Reads the files again whenever they change, so that certificates rotate without a restart.

    A rotation that cannot be read (half written, say) leaves the certificates in use as they are.
    """
    return grpc.dynamic_ssl_server_credentials(_certificates(tls), _fetcher(tls), require_client_authentication=bool(tls.ca))


def _certificates(tls: Tls) -> grpc.ServerCertificateConfiguration:
    cert, key, ca = tls.read()
    if cert is None or key is None:
        raise ConfigError("--tls-cert and --tls-key: a server with TLS needs both")
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)


def _fetcher(tls: Tls) -> Callable[[], Any]:
    seen = tls._stamp()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal seen
        try:
            stamp = tls._stamp()
            if stamp == seen:
                return None
            fresh = _certificates(tls)
        except (OSError, ConfigError):
            return None
        seen = stamp
        return fresh

    return fetch
