"""Who calls: bearer tokens and client certificates -> the name of a tenant. For the router and the KV service alike.

    auth = Authenticator.of(config)
    tenant = auth.tenant(context)          # in a handler, sync or asyncio; raises Unauthenticated

The file of tokens has a line per token, `tenant: token`; lines that begin with # are comments; a tenant may have several.
It is read again when it changes. Tokens are kept as digests, compared in constant time, and never logged. What a call says
of itself in its request never counts.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from forefetch.errors import ConfigError, Unauthenticated
from forefetch.settings import ServiceConfig, setting

_log = logging.getLogger(__name__)
ANONYMOUS = "default"
"""The one tenant where nobody says who they are."""
_NAME = re.compile(r"[A-Za-z0-9._@/+-]{1,128}")
MIN_TOKEN = 16
"""Fewest characters of a token."""


@dataclass(frozen=True)
class AuthConfig(ServiceConfig):
    """Settings of a service that tells its callers apart."""

    TITLE: ClassVar[str] = "callers"

    auth_tokens: str = setting(
        "",
        """File of bearer tokens, a line `tenant: token` each, tokens of 16 characters or more. Callers must send one of them as
        `authorization: Bearer TOKEN` and act for its tenant. Read again when it changes. Unset: no tokens are asked for.""",
        form="FILE",
    )
    auth_certificates: bool = setting(
        False,
        """Take the caller's tenant from its client certificate: the common name, else the first subject alternative name. Needs
        --tls-cert and --tls-ca. With --auth-tokens as well, a call that carries a token is judged by the token.""",
    )
    allow_anonymous: bool = setting(
        False,
        """Serve callers who do not say who they are, as tenant "default", on an address that is not loopback and without
        --tls-ca. Anyone who reaches the port then shares what is kept there.""",
    )

    def validate(self) -> None:
        """Raises ConfigError naming the bad setting or pair."""
        super().validate()
        if self.auth_certificates and not (self.tls_cert and self.tls_ca):
            raise ConfigError("--auth-certificates: needs --tls-cert and --tls-ca")
        loopback = self.listen.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
        asked = self.auth_tokens or self.auth_certificates or (self.tls_cert and self.tls_ca)
        if not loopback and not asked and not self.allow_anonymous:
            raise ConfigError(
                "--listen: an address that is not loopback needs --auth-tokens, --tls-ca with --tls-cert, or --allow-anonymous"
            )


class Reloaded:
    """A file's meaning, read again when the file changes. A change that cannot be read leaves the meaning as it was."""

    def __init__(self, path: str, read: Callable[[str], Any], flag: str) -> None:
        """Raises ConfigError naming `flag` if the file cannot be read or `read` says so."""
        self._path, self._read, self._flag = Path(path), read, flag
        self._lock, self._said = threading.Lock(), ""
        self._stamp = self._look()
        self._value = self._parse()

    def get(self) -> Any:
        """The latest good meaning."""
        with self._lock:
            try:
                stamp = self._look()
                if stamp != self._stamp:
                    self._stamp = stamp
                    self._value = self._parse()
                self._said = ""
            except ConfigError as error:
                if str(error) != self._said:  # once, and not for every call
                    _log.error("%s; what was read before stays in force", error)
                self._said = str(error)
            return self._value

    def _look(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self._path)
        except OSError as error:
            raise ConfigError(f"{self._flag}: cannot read the file: {error.strerror}") from None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _parse(self) -> Any:
        try:
            return self._read(self._path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._flag}: cannot read the file: {type(error).__name__}") from None


class Authenticator:
    """`tokens`: file of bearer tokens or "". `certificates`: whether client certificates name tenants.

    `refused` counts calls that were turned away.
    """

    def __init__(self, tokens: str = "", certificates: bool = False) -> None:
        self.refused = 0
        self._tokens = Reloaded(tokens, _read_tokens, "--auth-tokens") if tokens else None
        self._certificates = certificates

    @classmethod
    def of(cls, config: AuthConfig) -> Authenticator:
        """As the settings say."""
        return cls(config.auth_tokens, config.auth_certificates)

    def tenant(self, context: Any) -> str:
        """The tenant that a call acts for. `context`: a ServicerContext of grpc or grpc.aio. Raises Unauthenticated."""
        try:
            return self.judge(context.invocation_metadata() or (), context.auth_context())
        except Unauthenticated:
            self.refused += 1
            raise

    def judge(self, metadata: Sequence[tuple[str, str | bytes]], peer: Mapping[str, Sequence[bytes]]) -> str:
        """`tenant` of a call's metadata and what TLS knows of the caller."""
        sent = [value for key, value in metadata if key == "authorization"]
        if self._tokens is not None and (sent or not self._certificates):
            return self._by_token(sent)
        if self._certificates:
            return _by_certificate(peer)
        return ANONYMOUS

    def _by_token(self, sent: Sequence[str | bytes]) -> str:
        if len(sent) != 1 or not isinstance(sent[0], str) or not sent[0][:7].lower() == "bearer ":
            raise Unauthenticated("send one `authorization: Bearer TOKEN`")
        digest, found = hashlib.sha256(sent[0][7:].strip().encode()).digest(), ""
        assert self._tokens is not None
        for known, tenant in self._tokens.get():  # all of them, always: the time says nothing about which one matched
            if hmac.compare_digest(known, digest):
                found = tenant
        if not found:
            raise Unauthenticated("the token is not known")
        return found


def _by_certificate(peer: Mapping[str, Sequence[bytes]]) -> str:
    for field in ("x509_common_name", "x509_subject_alternative_name"):
        for name in peer.get(field, ()):
            text = name.decode(errors="replace")
            if not _NAME.fullmatch(text.replace(":", "/")):
                raise Unauthenticated("the name in the certificate cannot be a tenant's")
            return text
    raise Unauthenticated("a client certificate with a name is needed")


def _read_tokens(text: str) -> list[tuple[bytes, str]]:
    """(digest of the token, tenant) by line. Errors name the line, never what stands there."""
    found: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        tenant, colon, token = (part.strip() for part in line.partition(":"))
        if not colon or not _NAME.fullmatch(tenant) or len(token) < MIN_TOKEN or not token.isascii() or " " in token:
            raise ConfigError(
                f"--auth-tokens: line {number} is not `tenant: token` with a token of {MIN_TOKEN} characters or more"
            )
        digest = hashlib.sha256(token.encode()).digest()
        if found.get(digest, tenant) != tenant:
            raise ConfigError(f"--auth-tokens: line {number} gives a token to a second tenant")
        found[digest] = tenant
    if not found:
        raise ConfigError("--auth-tokens: the file holds no token")
    return list(found.items())


def bearer(path: str, flag: str = "--token-file") -> Callable[[], Sequence[tuple[str, str]]]:
    """For callers: metadata with the token in a file (the file's only content), read again when it changes; none for ""."""
    if not path:
        return lambda: ()
    file = Reloaded(path, lambda text: text.strip(), flag)
    return lambda: (("authorization", f"Bearer {file.get()}"),)
