"""`forefetch stats` against a router that is scripted but really served."""

from __future__ import annotations

import json
from collections.abc import Iterator

import grpc
import pytest
from scripted_router import ScriptedRouter, run

from forefetch.cli import load, stats
from forefetch.errors import Unavailable
from forefetch.v1 import router_pb2


@pytest.fixture
def router() -> Iterator[ScriptedRouter]:
    with ScriptedRouter() as scripted:
        yield scripted


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def test_once(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    router.stats = full_stats()
    assert run(stats, router) == 0
    out = capsys.readouterr().out
    for text in (
        "2 running, 1 waiting; 1,200 done, 3 UNAVAILABLE",
        "p50 6.10 ms, p99 19.0 ms",
        "34 of 128",
        "1 of 2",
        "down",
        "attention",
    ):
        assert text in out, text
    assert "k:1  up  7 blocks sent" in out
    assert "/s" not in out


def test_as_json(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    router.stats = full_stats()
    assert run(stats, router, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["requests_failed"] == {"UNAVAILABLE": 3}
    assert shown["workers"][1]["up"] is False
    assert shown["tpot"]["p99_ns"] == 19_000_000


def full_stats() -> router_pb2.GetStatsResponse:
    return router_pb2.GetStatsResponse(
        uptime_s=8_000,
        requests_ok=1_200,
        requests_failed={"UNAVAILABLE": 3},
        running=2,
        waiting=1,
        prompt_tokens=9_000,
        completion_tokens=80_000,
        steps=70_000,
        replayed_steps=1,
        pages_total=128,
        pages_used=34,
        ttft=router_pb2.Quantiles(p50_ns=30_000_000, p99_ns=80_000_000, count=1_200),
        tpot=router_pb2.Quantiles(p50_ns=6_100_000, p99_ns=19_000_000, count=70_000),
        mean_step=router_pb2.StepTimings(total_ns=6_200_000, attention_ns=2_000_000, expert_ns=3_000_000, batch=2),
        workers=[
            router_pb2.WorkerStatus(address="a:1", link="shm", up=True, experts=64, shard=0, shards=2, pairs=5, calls=3),
            router_pb2.WorkerStatus(address="b:2", link="grpc", experts=64, shard=1, shards=2),
        ],
        kv=router_pb2.KvStatus(address="k:1", up=True, blocks_sent=7),
    )


Answer = router_pb2.GetStatsResponse | grpc.StatusCode


def polls(router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch, first: Answer, *others: Answer) -> None:
    """Lets `--watch` get these answers, then presses Ctrl-C."""
    router.stats = first
    left = iter(others)

    def sleep(_: float) -> None:
        following = next(left, None)
        if following is None:
            raise KeyboardInterrupt
        router.stats = following

    monkeypatch.setattr("forefetch.cli.stats.sleep", sleep)


def test_watching_shows_rates_and_survives_a_router_that_goes_away(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    later = full_stats()
    later.completion_tokens += 100
    clock = iter((10.0, 12.0))
    monkeypatch.setattr("forefetch.cli.stats.monotonic", lambda: next(clock))
    shown = []
    monkeypatch.setattr("forefetch.cli.stats.Live.update", lambda _self, screen, **_: shown.append(screen))
    monkeypatch.setenv("FORCE_COLOR", "1")
    polls(router, monkeypatch, full_stats(), grpc.StatusCode.UNAVAILABLE, later)
    assert run(stats, router, "--watch") == 0
    assert len(shown) == 3
    assert "not now" in str(shown[1])
    stats.Console(width=120).print(shown[2])
    assert "80,100  50.0/s" in capsys.readouterr().out


def test_watching_into_a_pipe_prints_one_screen_after_the_other(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    polls(router, monkeypatch, full_stats(), full_stats())
    assert run(stats, router, "--watch") == 0
    assert capsys.readouterr().out.count("2 running, 1 waiting") == 2


def test_watching_as_json_prints_a_line_for_each_answer(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    polls(router, monkeypatch, full_stats(), full_stats())
    assert run(stats, router, "--watch", "0.1", "--json") == 0
    assert [json.loads(line)["running"] for line in capsys.readouterr().out.splitlines()] == [2, 2]


def test_a_router_that_is_not_there(router: ScriptedRouter) -> None:
    router.stats = grpc.StatusCode.UNAVAILABLE
    with pytest.raises(Unavailable):
        run(stats, router, "--watch")


def test_hints_are_shown_layer_by_layer_and_added_up() -> None:
    layers = [
        router_pb2.LayerHints(layer=0, misses=4, stall_ns=2_500_000),  # nothing can be named for the first
        router_pb2.LayerHints(
            layer=1,
            chosen=800,
            all=router_pb2.HintCount(named=1_000, found=776),
            next=router_pb2.HintCount(named=990, found=760),
            hits=700,
            late=60,
            misses=24,
            resident=16,
            wasted_bytes=3_000_000,
        ),
        router_pb2.LayerHints(layer=2, chosen=200, all=router_pb2.HintCount(named=250, found=124)),
    ]
    found = full_stats()
    found.hints.CopyFrom(router_pb2.HintStats(setting="auto", mode="plain", trained=True, sent=1_990, layers=layers))
    console = stats.Console(width=160)
    with console.capture() as shown:
        console.print(stats.render("a:1", found))
    lines = shown.get().splitlines()
    assert any("auto, trained heads  now plain" in line and "1,990 hints sent" in line for line in lines)
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows["1"][1:4] == ["800", "97.0", "%"]
    assert rows["0"][-1] == "2.5"
    assert rows["all"][1:4] == ["1,000", "90.0", "%"]


def test_no_figure_is_cut_in_80_columns() -> None:
    found = full_stats()
    count = router_pb2.HintCount(named=1_000, found=776)
    layers = [
        router_pb2.LayerHints(layer=layer, chosen=80_000, all=count, next=count, second=count, refined=count, hits=123_456)
        for layer in range(3)
    ]
    found.hints.CopyFrom(router_pb2.HintStats(setting="auto", mode="plain", trained=True, layers=layers))
    found.expert_load.add(layer=0, pairs=range(64))
    console = stats.Console(width=80)
    with console.capture() as shown:
        console.print(stats.render("a:1", found))
        console.print(load.table(found))
    assert "…" not in shown.get()
    assert "240,000" in shown.get()
    assert len(shown.get().splitlines()[-1].split()[-1]) > 30, "bars take the rest of the line"


def test_a_router_that_just_started() -> None:
    console = stats.Console(width=100)
    with console.capture() as shown:
        console.print(stats.render("a:1", router_pb2.GetStatsResponse(uptime_s=3)))
    assert "0 running, 0 waiting; 0 done" in shown.get()


@pytest.mark.parametrize(
    ("seconds", "text"), [(3, "3 seconds"), (150, "2.5 minutes"), (9_000, "2.5 hours"), (216_000, "2.5 days")]
)
def test_spans_of_time(seconds: float, text: str) -> None:
    assert stats._span(seconds) == text
