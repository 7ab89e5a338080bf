"""The shipped heads fit the shipped model and name what the model card says they do, on a little of the held-out text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router_service.lookahead.__main__ import main

REFERENCE = Path(__file__).resolve().parents[2] / "models" / "reference"


def test_the_shipped_heads_reach_their_goal_on_a_little_text(capfd: pytest.CaptureFixture[str]) -> None:
    """Seven layers of 160 tokens a domain, eight experts each: a share of 0.97 there has a standard error under 0.005."""
    texts = [str(REFERENCE / "heldout" / f"{domain}.txt") for domain in ("code", "conversation")]
    limits = ["--tokens", "160", "--context", "48", "--threads", "1"]
    assert main(["eval", "--model", str(REFERENCE), "--text", *texts, *limits, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    for domain in ("code", "conversation"):
        assert answer[domain]["control"] == 1.0
        assert answer[domain]["L+1"]["slots@k+2"] > 0.955
        assert answer[domain]["L+2"]["slots@k+2"] > 0.925
        baselines = answer[domain]["baselines"]
        assert answer[domain]["L+1"]["slots@k+2"] > baselines["without attention"]["L+1"]["slots@k+2"]
        assert baselines["without attention"]["L+1"]["slots@k+2"] > baselines["next gate"]["L+1"]["slots@k+2"]
