"""Flags and environment variables -> frozen dataclasses. The only module that reads the environment.

A service describes its settings as a frozen dataclass whose fields are made by `setting(...)`: default, then a paragraph
that states unit, consequence and valid combinations. From that one description come the flag (`max_batch` ->
`--max-batch`), the variable (`FOREFETCH_ROUTER_MAX_BATCH`), the `--help` text and the error for a bad value. Flags win over
variables, variables over defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, get_type_hints

from forefetch.errors import ConfigError

C = TypeVar("C", bound="Config")


def setting(default: Any, text: str, *, choices: Sequence[str] = (), form: str = "") -> Any:
    """A dataclass field with its paragraph. `choices` limits a string to a closed set; `form` is what `--help` shows for other
    ones, as HOST:PORT."""
    metadata = {"help": " ".join(text.split()), "choices": tuple(choices), "form": form}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """Base of every settings class: `PROG` names the command, `ENV` prefixes its variables, `TITLE` heads a class's own
    settings in `--help` ("": they stand among the parser's other options)."""

    PROG: ClassVar[str] = "forefetch"
    ENV: ClassVar[str] = "FOREFETCH_"
    TITLE: ClassVar[str] = ""

    def validate(self) -> None:
        """Raises ConfigError naming the bad setting or pair. Called by `parse`; a subclass extends it."""
        for field in dataclasses.fields(self):
            choices = field.metadata.get("choices")
            if choices and getattr(self, field.name) not in choices:
                raise ConfigError(f"{flag(field.name)}: must be one of {', '.join(choices)}")


def flag(name: str) -> str:
    """max_batch -> --max-batch."""
    return "--" + name.replace("_", "-")


def _boolean(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def _reader(kind: Any) -> Callable[[str], Any]:
    readers: dict[Any, Callable[[str], Any]] = {bool: _boolean, int: int, float: float, str: str}
    return readers[kind]


def _convert(cls: type[Config], name: str, kind: Any, text: str) -> Any:
    try:
        return _reader(kind)(text)
    except ValueError:
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise ConfigError(f"{flag(name)}: {text!r} is not {wanted}") from None


def add_arguments(parser: argparse.ArgumentParser, cls: type[Config], only: Sequence[str] = ()) -> None:
    """Adds a flag for each field of `cls` (or those named in `only`), the class's own first, then those of its bases under
    their titles. Values stay strings until `build`."""
    hints, fields = get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls)}
    for base in cls.__mro__:
        names = [name for name in inspect.get_annotations(base) if name in fields and (not only or name in only)]
        if not names:
            continue
        title = vars(base).get("TITLE")  # not a base's
        group: Any = parser.add_argument_group(title) if title else parser
        for name in names:
            _add_argument(group, cls, fields.pop(name), hints[name])


def _add_argument(group: Any, cls: type[Config], field: dataclasses.Field[Any], kind: Any) -> None:
    shown = {"True": "on", "False": "off", "": "unset"}.get(str(field.default), field.default)
    text = f"{field.metadata['help']} (default: {shown}; ${cls.ENV}{field.name.upper()})".replace("%", "%%")
    choices = "{" + ",".join(field.metadata["choices"]) + "}" if field.metadata["choices"] else ""
    plain = {int: "N", float: "X", bool: "BOOL", str: "TEXT"}[kind]
    optional: dict[str, Any] = {"nargs": "?", "const": "true"} if kind is bool else {}
    group.add_argument(
        flag(field.name),
        dest=field.name,
        default=None,
        help=text,
        metavar=choices or field.metadata["form"] or plain,
        **optional,
    )


def build(cls: type[C], values: Mapping[str, str | None], environ: Mapping[str, str] | None = None) -> C:
    """`values` (flags, None = not given) over `environ` (default: the process's) over defaults, validated."""
    environ = os.environ if environ is None else environ
    hints = get_type_hints(cls)
    chosen: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        text = values.get(field.name)
        if text is None:
            text = environ.get(cls.ENV + field.name.upper())
        if text is not None:
            chosen[field.name] = _convert(cls, field.name, hints[field.name], text)
    config = cls(**chosen)
    config.validate()
    return config


def parse(cls: type[C], argv: Sequence[str] | None = None) -> C:
    """Reads the command line of a service. Exits with 2 and one line when a setting is wrong."""
    parser = argparse.ArgumentParser(
        prog=cls.PROG, description=textwrap.dedent(cls.__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, cls)
    try:
        return build(cls, vars(parser.parse_args(argv)))
    except ConfigError as error:
        parser.error(str(error))


def child_environment(**overrides: str) -> dict[str, str]:
    """This process's environment for a process it starts, with `overrides` on top."""
    return {**os.environ, **overrides}


def to_flags(config: Config) -> list[str]:
    """The flags that make a child process build an equal config."""
    flags: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            flags.append(f"{flag(field.name)}={str(value).lower() if isinstance(value, bool) else value}")
    return flags


@dataclass(frozen=True)
class ServiceConfig(Config):
    """Settings that every service has."""

    TITLE: ClassVar[str] = "addresses, TLS, telemetry"

    listen: str = setting(
        "127.0.0.1:0",
        """host:port to serve gRPC on. Port 0 takes a free one; the process prints one JSON line
        {"event": "ready", "address": ..., "metrics": ...} on standard output when it can serve.""",
        form="HOST:PORT",
    )
    metrics_listen: str = setting(
        "",
        """host:port for Prometheus' /metrics over HTTP; port 0 takes a free one. Unset: no HTTP server.""",
        form="HOST:PORT",
    )
    health_listen: str = setting(
        "",
        """host:port for grpc.health.v1 alone, always without TLS: for probes that know no certificates, such as the kubelet's.
        The same names are served beside the API. Unset: only there.""",
        form="HOST:PORT",
    )
    otlp_endpoint: str = setting(
        "",
        """host:port of an OTLP/gRPC collector for spans, or an http:// address for OTLP/HTTP. Unset: no spans are built. A
        collector that is down or slow costs spans, never requests.""",
        form="HOST:PORT",
    )
    trace_ratio: float = setting(
        0.01,
        """Share of requests, 0 to 1, whose spans are built when the caller sends no traceparent (a caller's own sampling
        decision wins). Failed and slow requests are always built.""",
    )
    reflection: bool = setting(False, "Serve gRPC reflection, so that generic clients can list and call the services.")
    tls_cert: str = setting("", "PEM file with this server's certificate chain. Needs --tls-key.", form="FILE")
    tls_key: str = setting("", "PEM file with the certificate's private key. Needs --tls-cert.", form="FILE")
    tls_ca: str = setting(
        "",
        """PEM file with the authority that signs peers. With --tls-cert set, callers must present a certificate it signed;
        calls to other services of the cluster are made over TLS, with the same certificate.""",
        form="FILE",
    )
    allow_plaintext: bool = setting(
        False, "Serve without TLS on an address that is not loopback. Meant for networks that encrypt by other means."
    )
    drain_s: float = setting(
        30.0,
        """Seconds that running requests get to finish after SIGTERM or SIGINT. New ones are refused at once; what is left is
        ended with UNAVAILABLE. A second signal ends the wait.""",
    )
    log_level: str = setting(
        "info", "Least severity that is logged to standard error.", choices=("debug", "info", "warning", "error")
    )

    def validate(self) -> None:
        """Raises ConfigError naming the bad setting or pair."""
        super().validate()
        if not 0.0 <= self.trace_ratio <= 1.0:
            raise ConfigError("--trace-ratio: must be within 0 and 1")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("--tls-cert and --tls-key: set both or neither")
        if self.drain_s < 0:
            raise ConfigError("--drain-s: must not be negative")
        for name in ("listen", "metrics_listen", "health_listen"):
            address = getattr(self, name)
            if address or name == "listen":
                host, _, port = address.rpartition(":")
                if not host or not port.isdigit() or int(port) > 65535:
                    raise ConfigError(f"{flag(name)}: {address!r} is not host:port")
        host = self.listen.rpartition(":")[0]
        if host not in ("127.0.0.1", "localhost", "[::1]") and not self.tls_cert and not self.allow_plaintext:
            raise ConfigError("--listen: an address that is not loopback needs --tls-cert and --tls-key, or --allow-plaintext")
