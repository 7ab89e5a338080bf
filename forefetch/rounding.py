"""How experts' weights are rounded, in the words in which routers and workers tell each other."""

from __future__ import annotations

from typing import Final

from forefetch.errors import ConfigError

SHADOW: Final = "int4"
"""The format of copies from which absent experts are evaluated (--miss shadow)."""


def rounding(experts: str, miss: str) -> str:
    """What --experts and --miss make of weights: "stored", "int8 shadowed by int4", ..."""
    return experts + (f" shadowed by {SHADOW}" if miss == "shadow" else "")


def check(experts: str, miss: str) -> None:
    """ConfigError when there is no format to shadow these experts in."""
    if miss == "shadow" and experts == SHADOW:
        raise ConfigError(f"--miss shadow and --experts {experts}: shadows are {SHADOW}, which would save nothing")
