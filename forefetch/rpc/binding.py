"""What a server takes hold of before it serves: its ports, /metrics, reflection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forefetch.errors import ConfigError
from forefetch.rpc.channels import server_credentials, tls_of
from forefetch.settings import ServiceConfig

# Health, reflection and Prometheus come with the `serve` extra; a client must be able to import this package without them.
if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


def bind(config: ServiceConfig, server: Any) -> str:
    """Adds config.listen to a sync or asyncio server; host:port with the port that was taken."""
    tls = tls_of(config)
    try:
        if tls is not None and tls.cert:
            port = server.add_secure_port(config.listen, server_credentials(tls))
        else:
            port = server.add_insecure_port(config.listen)
    except RuntimeError:
        raise ConfigError(
            f"--listen: cannot serve on {config.listen}: the port is in use, or the address is not ours"
        ) from None
    return f"{config.listen.rpartition(':')[0]}:{port}"


def start_metrics(config: ServiceConfig, registry: CollectorRegistry | None) -> tuple[str, Any]:
    """(host:port of /metrics or "", its HTTP server or None)."""
    if not config.metrics_listen or registry is None:
        return "", None
    from prometheus_client import start_http_server

    host, _, port = config.metrics_listen.rpartition(":")
    try:
        httpd, _thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise ConfigError(f"--metrics-listen: cannot serve on {config.metrics_listen}: {error.strerror}") from None
    return f"{host}:{httpd.server_port}", httpd


def enable_reflection(config: ServiceConfig, names: Sequence[str], server: Any) -> None:
    """Serves reflection for these services, if the settings want it."""
    if not config.reflection:
        return
    from grpc_health.v1 import health
    from grpc_reflection.v1alpha import reflection

    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)


def bind_probes(listen: str, server: Any) -> str:
    """Adds the plaintext health port to a sync or asyncio server; host:port with the port that was taken."""
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError:
        raise ConfigError(
            f"--health-listen: cannot serve on {listen}: the port is in use, or the address is not ours"
        ) from None
    return f"{listen.rpartition(':')[0]}:{port}"
