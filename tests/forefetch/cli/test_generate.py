"""`forefetch generate` against a router that is really served but answers from a script."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from scripted_router import ScriptedRouter

from forefetch import cli
from forefetch.v1 import router_pb2

WORDS = ["Ein", " Bär", "", " 🙂", "!"]


class Speaker(ScriptedRouter):
    """Says WORDS, then finishes; with `stuck`, never finishes."""

    stuck = False

    def Generate(self, request: router_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        self.asked.append(request)
        for index, text in enumerate(WORDS):
            token = router_pb2.TokenEvent(index=index, token_id=100 + index, text=text)
            token.timings.total_ns = 2_000_000
            if request.HasField("top_logprobs"):
                token.logprob.CopyFrom(router_pb2.TokenLogprob(token_id=100 + index, logprob=-0.5))
                token.top_logprobs.add(token_id=7, logprob=-0.25)
            yield router_pb2.GenerateResponse(token=token)
        while self.stuck and context.is_active():
            time.sleep(0.02)
        usage = router_pb2.Usage(prompt_tokens=3, completion_tokens=len(WORDS))
        finish = router_pb2.FinishEvent(
            reason=router_pb2.FINISH_REASON_STOP_STRING, text="?", usage=usage, request_id="r1", seed=9
        )
        finish.stop_string = "END"
        yield router_pb2.GenerateResponse(finish=finish)


@pytest.fixture
def router() -> Iterator[Speaker]:
    with Speaker() as speaker:
        yield speaker


def test_streams_text_to_stdout_and_a_summary_to_stderr(router: Speaker, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--address", router.address, "Es war"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Ein Bär 🙂!?\n"
    assert captured.err.startswith("3 + 5 tokens · stop_string · TTFT ")
    assert captured.err.count("\n") == 1
    assert "TPOT p50" in captured.err
    assert captured.err.endswith("seed 9 · request r1\n")
    asked = router.asked[0]
    assert asked.text == "Es war"
    assert asked.sampling == router_pb2.SamplingParams(), "what is not given stays unset"
    assert not asked.stop.HasField("max_tokens")


def test_every_flag_reaches_the_router(router: Speaker, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--max-tokens 5 --temperature 0 --top-p 0.5 --top-k 7 --min-p 0.25 --seed 0 --stop END --stop X --ignore-eos"
    assert cli.main(["generate", "--address", router.address, *flags.split(), "--request-id", "mine", "hello"]) == 0
    asked = router.asked[0]
    assert asked.stop == router_pb2.StopParams(max_tokens=5, strings=["END", "X"], ignore_eos=True)
    assert asked.sampling.HasField("temperature")
    assert asked.sampling.HasField("seed")
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (0.0, 0.5, 7)
    assert (asked.sampling.min_p, asked.sampling.seed) == (0.25, 0)
    assert asked.request_id == "mine"


def test_chat_and_system_make_turns(router: Speaker, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--address", router.address, "--chat", "hi"]) == 0
    assert cli.main(["generate", "--address", router.address, "--system", "be brief", "hi"]) == 0
    turns = [[(turn.role, turn.content) for turn in asked.chat.messages] for asked in router.asked]
    assert turns == [[("user", "hi")], [("system", "be brief"), ("user", "hi")]]


def test_json_is_one_object(router: Speaker, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--address", router.address, "--json", "--logprobs", "1", "x"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    answer = json.loads(captured.out)
    assert answer["text"] == "Ein Bär 🙂!?"
    assert answer["token_ids"] == [100, 101, 102, 103, 104]
    assert answer["finish_reason"] == "stop_string"
    assert answer["stop_string"] == "END"
    assert answer["usage"]["completion_tokens"] == 5
    assert len(answer["timings"]) == 5
    assert answer["timings"][0]["total_ms"] == 2.0
    assert answer["ttft_ms"] > 0
    assert answer["tpot_ms_p99"] >= answer["tpot_ms_p50"] > 0
    assert answer["logprobs"][0] == {"logprob": -0.5, "top": [[7, -0.25]]}


@pytest.mark.parametrize("argument", [[], ["-"]])
def test_the_prompt_may_come_from_stdin(
    argument: list[str], router: Speaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    assert cli.main(["generate", "--address", router.address, *argument]) == 0
    assert router.asked[0].text == "from a pipe\n"


def test_logprobs_without_json_are_wrong_usage(router: Speaker, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--address", router.address, "--logprobs", "1", "x"]) == 2
    assert "--json" in capsys.readouterr().err


def test_a_deadline_is_one_line(router: Speaker, capsys: pytest.CaptureFixture[str]) -> None:
    router.stuck = True
    assert cli.main(["generate", "--address", router.address, "--timeout", "2", "x"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "Ein Bär 🙂!\n", "what came is shown"
    assert captured.err.startswith("forefetch: error: ")
    assert captured.err.count("\n") == 1


def test_ctrl_c_is_quiet_and_cancels(router: Speaker) -> None:
    router.stuck = True
    command = [sys.executable, "-m", "forefetch.cli", "generate", "--address", router.address, "x"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout
        assert process.stdout.read(3) == b"Ein"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b""


def test_a_reader_that_goes_away_is_quiet(router: Speaker) -> None:
    command = f"{sys.executable} -m forefetch.cli generate --json --address {router.address} x | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=240, check=False)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
