"""`forefetch trace` against a router that is scripted but really served; the page as data."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from sample_trace import LAYERS, sample
from scripted_router import ScriptedRouter, run

from forefetch.cli import trace, waterfall
from forefetch.errors import BadRequest, ConfigError, NotFound
from forefetch.v1 import router_pb2


@pytest.fixture
def router() -> Iterator[ScriptedRouter]:
    with ScriptedRouter() as scripted:
        yield scripted


def test_a_new_request_in_the_terminal_and_as_a_page(
    router: ScriptedRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    page = tmp_path / "page.html"
    assert run(trace, router, "--prompt", "Once upon", "--max-tokens", "20", "--html", str(page)) == 0
    (asked,) = router.asked
    assert (asked.text, asked.stop.max_tokens) == ("Once upon", 20)
    out = capsys.readouterr().out
    assert asked.request_id in out
    for text in (
        "prompt 512",
        "prompt 171 + token 0",
        "token 19",
        "Median: token",
        "Slowest: token 17",
        "copy wait",
        "10.1.0.4:7101",
        "7 of 8",
        "3 hit 1 miss",
    ):
        assert text in out, text
    assert "Where the time went, over 19 tokens" in out
    assert max(map(len, out.splitlines())) <= 120
    assert asked.request_id in page.read_text(encoding="utf-8")


def test_an_earlier_request_as_json(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace, router, "--request-id", "story-7", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert not router.asked
    assert shown["request_id"] == "story-7"
    assert isinstance(shown["arrival_unix_ns"], int)
    assert [step["token_index"] for step in shown["steps"]] == [None, *range(20)]
    assert len(shown["steps"][3]["layers"]) == LAYERS


def test_errors(router: ScriptedRouter, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        run(trace, router, "other")
    with pytest.raises(ConfigError, match="--html"):
        run(trace, router, "--request-id", "story-7", "--html", str(tmp_path / "no" / "page.html"))
    with pytest.raises(SystemExit):
        run(trace, router)
    with pytest.raises(SystemExit):
        run(trace, router, "--prompt", "x", "y")


def shown(message: router_pb2.GetTraceResponse, width: int = 100, **options: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    waterfall.terminal(message, console, **options)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_long_requests_keep_the_first_and_the_slowest_steps() -> None:
    text = shown(sample(tokens=40), most_steps=10, most_layers=2)
    listed = text.partition("Median")[0]
    assert listed.count("token ") == 9
    assert all(f"token {token} " in listed for token in (0, 1, 2, 3, 17, 31))
    hidden = sum(int(count) for count in re.findall(r"… (\d+) faster", listed))
    assert hidden == 41 - 10
    assert text.count(f"{LAYERS - 2} faster layers are not shown") == 2


@pytest.mark.parametrize("width", [80, 200])
def test_no_figure_is_cut_and_bars_take_the_rest(width: int) -> None:
    text = shown(sample(tokens=4), width)
    assert "token 3" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert "█" in text.partition("Median")[2].splitlines()[2]


def test_a_terminal_that_is_far_too_narrow() -> None:
    assert "token 3" in shown(sample(tokens=4), 40)


def test_traces_with_little_in_them() -> None:
    empty = router_pb2.GetTraceResponse(request_id="r")
    assert "No step" in shown(empty)
    message = sample(tokens=2)
    message.steps_lost = 7
    for step in message.steps:
        step.ClearField("layers")
        step.timings.Clear()
    text = shown(message)
    assert "7 no longer recorded" in text
    assert "recorded without layers" in text
    del message.steps[1:]  # a prompt that is not finished
    assert "over 1 steps" in shown(message)
    for each in (empty, message):
        assert "<html" in waterfall.html(each)


def test_bars_have_the_length_of_their_time() -> None:
    segments = [("attention", 20.0), ("gate", 1.0), ("link", 29.0)]
    assert str(waterfall.bar(segments, 100.0, 40)) == "█" * 20
    assert str(waterfall.bar(segments, 100.0, 40, offset=50.0)) == " " * 20 + "█" * 20
    assert str(waterfall.bar([("attention", 1.0)], 80.0, 40)) == "▌"


def test_the_page_is_self_contained_and_escapes_what_it_shows() -> None:
    message = sample(tokens=3)
    message.workers[0] = "</script><script>alert(1)</script><!--"
    page = waterfall.html(message)
    assert "alert(1)</script>" not in page
    assert page.count("<script") == 2
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}  # a namespace, never fetched
    assert not re.search(r"\b(src|href|@import)\s*=|url\(", page)
    assert "default-src 'none'" in page
    assert "innerHTML" not in page
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*)</script>', page)[0])
    assert data["workers"][0] == message.workers[0]
    assert [key for key, _ in data["parts"]] == [
        *("attention", "gate", "lookahead", "link", "expert", "copy_wait", "queue", "combine", "sampling")
    ]
    for key, _ in data["parts"]:
        assert page.count(f"--{key}: #") == 2, key  # a colour by day and one by night
    assert sum(data["steps"][2]["parts"]) <= data["steps"][2]["total"]
    layer, told = message.steps[2].layers[5], data["steps"][2]["layers"][5]
    assert told[8:] == [layer.chosen, layer.named, layer.found]
    call = layer.calls[0]
    assert told[6][0][6:] == [call.hits, call.late, call.misses, call.shadowed, call.copy_ns]
    assert call.hits


def test_trace_of_a_refused_request_says_why(router: ScriptedRouter) -> None:
    with pytest.raises(BadRequest, match="max_tokens"):
        run(trace, router, "--prompt", "x", "--max-tokens", "-1")
