"""Flags that say where a service is and how to be let in; the same for every command that calls one."""

from __future__ import annotations

import argparse
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from forefetch import rpc
from forefetch.errors import ConfigError

DEFAULT_ADDRESS = "127.0.0.1:50051"


def add_arguments(parser: Any, whose: str = "the router") -> None:
    """Adds --address, the caller's token and the TLS files."""
    parser.add_argument(
        "--address", type=_address, default=DEFAULT_ADDRESS, metavar="HOST:PORT", help=f"{whose} (default: %(default)s)"
    )
    parser.add_argument("--token-file", metavar="FILE", help="file with a bearer token to show, for --auth-tokens over there")
    group = parser.add_argument_group("TLS", "Without these the connection is plain.")
    group.add_argument("--tls-ca", default="", metavar="FILE", help="PEM file with the authority that signed the server")
    group.add_argument("--tls-cert", default="", metavar="FILE", help="PEM file with a certificate to present")
    group.add_argument("--tls-key", default="", metavar="FILE", help="PEM file with its private key")


def _address(text: str) -> str:
    """host:port, or several with commas. gRPC would take a missing port for 443, and one that is too large modulo 65536."""
    for part in text.split(","):
        host, _, port = part.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
            raise argparse.ArgumentTypeError(f"{part!r} is not host:port")
    return text


def seconds(text: str) -> float:
    """A time that may pass: a type for flags."""
    with suppress(ValueError):
        if math.isfinite(value := float(text)) and value >= 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")


def token_of(args: argparse.Namespace) -> str:
    """What the flags say; "" for none. ConfigError for a file that cannot be read."""
    try:
        return Path(args.token_file).read_text().strip() if args.token_file else ""
    except OSError as error:
        raise ConfigError(f"--token-file: cannot read the file: {error.strerror}") from None


def tls_of(args: argparse.Namespace) -> rpc.Tls | None:
    """What the flags say; None for plaintext. ConfigError for half a pair."""
    if bool(args.tls_cert) != bool(args.tls_key):
        raise ConfigError("--tls-cert and --tls-key: set both or neither")
    return rpc.Tls(args.tls_cert, args.tls_key, args.tls_ca) if args.tls_cert or args.tls_ca else None
