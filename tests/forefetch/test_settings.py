"""Flags over variables over defaults, and errors that name the setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from forefetch.errors import ConfigError
from forefetch.settings import Config, ServiceConfig, build, parse, setting, to_flags


@dataclass(frozen=True)
class Demo(Config):
    """A demo."""

    PROG: ClassVar[str] = "demo"
    ENV: ClassVar[str] = "DEMO_"

    count: int = setting(3, "How many.")
    share: float = setting(0.5, "What share, in %.")
    loud: bool = setting(False, "Whether.")
    colour: str = setting("red", "Which.", choices=("red", "blue"))


def test_flags_win_over_variables_and_those_over_defaults() -> None:
    environ = {"DEMO_COUNT": "7", "DEMO_SHARE": "0.25"}
    assert build(Demo, {"count": "9", "share": None}, environ) == Demo(count=9, share=0.25)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": "x"}, "--count: 'x' is not a whole number"),
        ({"loud": "perhaps"}, "--loud"),
        ({"colour": "green"}, "--colour: must be one of red, blue"),
    ],
)
def test_a_bad_value_is_named(values: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Demo, values, {})


def test_a_config_survives_its_flags() -> None:
    config = Demo(count=1, loud=True, colour="blue")
    assert parse(Demo, to_flags(config)) == config


def test_help_and_errors_of_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(Demo, ["--help"])
    assert left.value.code == 0
    assert "What share, in %." in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        parse(Demo, ["--count=x"])
    assert left.value.code == 2
    assert "--count" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"listen": "nonsense"}, "--listen"),
        ({"listen": "0.0.0.0:50051"}, "--allow-plaintext"),
        ({"tls_cert": "a.pem"}, "--tls-cert and --tls-key"),
        ({"trace_ratio": "1.5"}, "--trace-ratio"),
        ({"drain_s": "-1"}, "--drain-s"),
        ({"metrics_listen": "127.0.0.1"}, "--metrics-listen"),
    ],
)
def test_what_every_service_refuses(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(ServiceConfig, flags, {})


def test_a_service_may_serve_the_network_when_told_so() -> None:
    assert build(ServiceConfig, {"listen": "0.0.0.0:50051", "allow_plaintext": "true"}, {}).allow_plaintext
