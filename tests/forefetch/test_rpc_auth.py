"""Callers -> tenants: tokens, certificates, and what is refused."""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from forefetch.errors import ConfigError, Unauthenticated
from forefetch.rpc import auth
from forefetch.rpc.auth import AuthConfig, Authenticator, bearer
from forefetch.settings import build

ACME, OTHER, SPARE = "acme-token-0123456789", "other-token-0123456789", "spare-token-0123456789"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    write(file, f"# tenants\n\nacme: {ACME}\nother:{OTHER}\nacme: {SPARE}\n")
    return file


def write(file: Path, text: str) -> None:
    """Replaces the file, as one would to rotate tokens."""
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, file)


def says(token: str) -> list[tuple[str, str | bytes]]:
    return [("traceparent", "x"), ("authorization", f"Bearer {token}")]


def test_a_token_names_its_tenant(tokens: Path) -> None:
    found = Authenticator(str(tokens))
    assert [found.judge(says(token), {}) for token in (ACME, OTHER, SPARE)] == ["acme", "other", "acme"]
    assert found.judge([("authorization", f"bearer  {ACME} ")], {}) == "acme"


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        says("unknown-token-0123456789"),
        says(ACME[:-1]),
        says(ACME + "0"),
        says(""),
        [("authorization", ACME)],
        [("authorization", f"Basic {ACME}")],
        [*says(ACME), *says(OTHER)],
        [("authorization", f"Bearer {ACME}".encode())],
    ],
)
def test_anything_else_is_refused(tokens: Path, metadata: list[tuple[str, str | bytes]]) -> None:
    with pytest.raises(Unauthenticated) as caught:
        Authenticator(str(tokens)).judge(metadata, {"x509_common_name": [b"acme"]})
    assert "token-0" not in str(caught.value)


def test_tokens_change_without_a_restart_and_a_broken_file_changes_nothing(
    tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = Authenticator(str(tokens))
    write(tokens, f"acme: {SPARE}\n")
    assert found.judge(says(SPARE), {}) == "acme"
    with pytest.raises(Unauthenticated):
        found.judge(says(ACME), {})
    write(tokens, f"acme {ACME}\n")
    assert found.judge(says(SPARE), {}) == "acme"
    tokens.unlink()
    assert found.judge(says(SPARE), {}) == "acme"
    assert found.judge(says(SPARE), {}) == "acme"
    assert caplog.text.count("cannot read the file") == 1, "not a line for every call"
    assert "line 1 is not `tenant: token`" in caplog.text
    assert "what was read before stays in force" in caplog.text


def test_tokens_are_kept_as_digests_compared_in_constant_time_and_never_logged(
    tokens: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: bool(compared.append((a, b))) or a == b)
    found = Authenticator(str(tokens))
    found.judge(says(ACME), {})
    with pytest.raises(Unauthenticated):
        found.judge(says("unknown-token-0123456789"), {})
    assert len(compared) == 6  # every token, whichever matches
    write(tokens, f"acme: {ACME} {OTHER}\n")
    found.judge(says(ACME), {})
    for secret in (ACME, OTHER, SPARE):
        assert secret not in caplog.text
        assert secret.encode() not in repr(vars(found)).encode() + repr(compared).encode()
    assert auth.hmac is hmac


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no token"),
        ("acme: short", "line 1 is not"),
        (f"# x\nacme: {ACME} x", "line 2 is not"),
        (f"a b: {ACME}", "line 1 is not"),
        (f": {ACME}", "line 1 is not"),
        (f"a: {ACME}\nb: {ACME}", "line 2 gives a token to a second tenant"),
    ],
)
def test_bad_files_are_refused_at_start_without_showing_them(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        Authenticator(str(file))
    assert ACME not in str(caught.value)
    with pytest.raises(ConfigError, match="--auth-tokens: cannot read the file"):
        Authenticator(str(tmp_path / "missing"))


def test_a_certificate_names_its_tenant() -> None:
    found = Authenticator(certificates=True)
    assert found.judge(says(ACME), {"x509_common_name": [b"acme"], "x509_subject_alternative_name": [b"x"]}) == "acme"
    assert found.judge([], {"x509_subject_alternative_name": [b"spiffe://cluster/ns/a/sa/router", b"y"]}).startswith("spiffe:")
    for peer in ({}, {"x509_common_name": [b""]}, {"x509_common_name": [b"a\nb"]}, {"x509_common_name": [b"\xff"]}):
        with pytest.raises(Unauthenticated):
            found.judge([], peer)


def test_a_token_wins_over_the_certificate_and_a_wrong_one_is_refused(tokens: Path) -> None:
    found = Authenticator(str(tokens), certificates=True)
    peer = {"x509_common_name": [b"named"]}
    assert found.judge(says(ACME), peer) == "acme"
    assert found.judge([], peer) == "named"
    with pytest.raises(Unauthenticated):
        found.judge(says("unknown-token-0123456789"), peer)


def test_nobody_is_asked_where_nothing_is_configured() -> None:
    assert Authenticator().judge(says(ACME), {"x509_common_name": [b"acme"]}) == "default"


def test_a_caller_s_token_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "token"
    write(file, ACME + "\n")
    metadata = bearer(str(file))
    assert list(metadata()) == [("authorization", f"Bearer {ACME}")]
    write(file, OTHER)
    assert list(metadata()) == [("authorization", f"Bearer {OTHER}")]
    assert list(bearer("")()) == []


TLS = {"tls_cert": "c", "tls_key": "k"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auth_certificates": "true"}, "--auth-certificates: needs --tls-cert and --tls-ca"),
        ({"auth_certificates": "true", **TLS}, "--auth-certificates: needs"),
        (
            {"listen": "0.0.0.0:1", "allow_plaintext": "true"},
            "needs --auth-tokens, --tls-ca with --tls-cert, or --allow-anonymous",
        ),
        ({"listen": "0.0.0.0:1", **TLS}, "--allow-anonymous"),
    ],
)
def test_settings_that_would_let_strangers_in(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(AuthConfig, settings, {})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"listen": "0.0.0.0:1", "allow_plaintext": "true", "allow_anonymous": "true"},
        {"listen": "0.0.0.0:1", "allow_plaintext": "true", "auth_tokens": "f"},
        {"listen": "0.0.0.0:1", **TLS, "tls_ca": "a"},
        {"listen": "0.0.0.0:1", **TLS, "tls_ca": "a", "auth_certificates": "true"},
    ],
)
def test_settings_that_do_not(settings: dict[str, Any]) -> None:
    built = build(AuthConfig, settings, {})
    assert (built.allow_plaintext, built.auth_tokens) == ("allow_plaintext" in settings, settings.get("auth_tokens", ""))
