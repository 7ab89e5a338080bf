"""Bad input to a real router and to real workers: the right code, the field's name, no internals, and everything stays up."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from cluster_calls import Router, Start, assert_fit_for_a_client, details, request
from google.rpc import error_details_pb2
from reference_model import CASES

from forefetch import rpc
from forefetch.cluster import Cluster
from forefetch.v1 import expert_pb2, expert_pb2_grpc, router_pb2

CASE = "qwen3"
CONTEXT, VOCABULARY, HIDDEN = 256, 320, 64
PROMPT = CASES[CASE].prompt


@pytest.fixture(scope="module")
def cluster(start: Start) -> Cluster:
    return start(CASE, link="grpc")


@pytest.fixture
def router(cluster: Cluster) -> Iterator[Router]:
    """A connection; afterwards every process must be the one it was, and answer."""
    before = {name: process.pid for name, process in cluster.processes.items()}
    client = Router(cluster.address)
    yield client
    assert len(client.generate(PROMPT, 3).tokens) == 3
    client.close()
    assert all(process.running and process.pid == before[name] for name, process in cluster.processes.items())


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": router_pb2.SamplingParams(**fields)}


def stop(**fields: Any) -> dict[str, Any]:
    return {"stop": router_pb2.StopParams(**fields)}


def tokens(*ids: int) -> dict[str, Any]:
    return {"tokens": router_pb2.TokenPrompt(ids=ids)}


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    messages = [router_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    return {"tokens": None, "chat": router_pb2.ChatPrompt(messages=messages)}


BAD = {
    "no prompt": ({"tokens": None}, "prompt"),
    "no ids": (tokens(), "tokens"),
    "empty text": ({"tokens": None, "text": ""}, "text"),
    "no messages": (chat(), "chat"),
    "unknown role": (chat(("wizard", "hello")), "chat"),
    "longer than the context": (tokens(*[5] * (CONTEXT + 1)), "tokens"),
    "as long as the context": (tokens(*[5] * CONTEXT), "tokens"),
    "text longer than the context": ({"tokens": None, "text": "🙂" * 200}, "text"),
    "far longer than the context": (tokens(*[5] * (4 << 20)), "tokens"),
    "more messages than anybody writes": (chat(*[("user", "")] * 10_001), "chat"),
    "more stop ids than there are": (stop(token_ids=[5] * (VOCABULARY + 1)), "stop.token_ids"),
    "id out of range": (tokens(5, VOCABULARY, 5), "tokens"),
    "id far out of range": (tokens(2**32 - 1), "tokens"),
    "temperature NaN": (sampling(temperature=math.nan), "sampling.temperature"),
    "temperature negative": (sampling(temperature=-0.5), "sampling.temperature"),
    "temperature infinite": (sampling(temperature=math.inf), "sampling.temperature"),
    "top_p zero": (sampling(temperature=1, top_p=0), "sampling.top_p"),
    "top_p above one": (sampling(temperature=1, top_p=1.5), "sampling.top_p"),
    "top_p NaN": (sampling(temperature=1, top_p=math.nan), "sampling.top_p"),
    "min_p above one": (sampling(temperature=1, min_p=1.01), "sampling.min_p"),
    "min_p NaN": (sampling(temperature=1, min_p=math.nan), "sampling.min_p"),
    "max_tokens zero": (stop(max_tokens=0), "stop.max_tokens"),
    "too many stop strings": (stop(strings=["x"] * 17), "stop.strings"),
    "an empty stop string": (stop(strings=[""]), "stop.strings"),
    "a long stop string": (stop(strings=["x" * 257]), "stop.strings"),
    "stop id out of range": (stop(token_ids=[VOCABULARY]), "stop.token_ids"),
    "too many logprobs": ({"top_logprobs": 21}, "top_logprobs"),
    "request id with a slash": ({"request_id": "a/b"}, "request_id"),
    "request id too long": ({"request_id": "a" * 129}, "request_id"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_refused_by_field(name: str, router: Router) -> None:
    change, field = BAD[name]
    with pytest.raises(grpc.RpcError) as caught:
        list(router.stub.Generate(request(PROMPT, 4, **change), timeout=60))
    error = caught.value
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
    assert_fit_for_a_client(error)
    violations = [v for d in details(error) if isinstance(d, error_details_pb2.BadRequest) for v in d.field_violations]
    assert len(violations) == 1, violations
    assert violations[0].field.startswith(field), violations
    assert violations[0].description


def test_max_tokens_beyond_the_context_end_there_and_say_so(router: Router) -> None:
    answer = router.generate(PROMPT, 10 * CONTEXT)
    assert len(answer.tokens) == CONTEXT - len(PROMPT)
    assert answer.finish.reason == router_pb2.FINISH_REASON_CONTEXT


def test_tokenize_refuses_the_same(router: Router) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        router.stub.Tokenize(router_pb2.TokenizeRequest(), timeout=60)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert_fit_for_a_client(caught.value)


def test_an_unknown_trace_is_not_found(router: Router) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        router.stub.GetTrace(router_pb2.GetTraceRequest(request_id="nobody"), timeout=60)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert_fit_for_a_client(caught.value)


def test_bytes_that_are_no_message_do_no_harm(router: Router) -> None:
    call = router.channel.unary_stream("/forefetch.v1.RouterService/Generate")
    with pytest.raises(grpc.RpcError) as caught:
        list(call(b"\xff" * 64, timeout=60))
    assert caught.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)
    assert_fit_for_a_client(caught.value)


# The worker's side: frames.


def section(data: bytes) -> bytes:
    """Padded to 32 bytes."""
    return data + bytes(-len(data) % 32)


def good_frame(layer: int, experts: list[int]) -> bytearray:
    """A layer call of two rows of ones, each for both experts at weight 0.5, written by hand as expert.proto says."""
    pairs = 4
    body = section(struct.pack(f"<{2 * HIDDEN}f", *[1.0] * 2 * HIDDEN))
    body += section(struct.pack("<4i", 0, 0, 1, 1)) + section(struct.pack("<4i", *experts, *experts))
    body += struct.pack("<4f", *[0.5] * pairs)
    header = struct.pack("<IHHQIIIIQQQII32x", 0x31524646, 1, 1, 7, layer, 2, HIDDEN, pairs, 0, 0, 0, 0, len(body))
    return bytearray(header + body)


def patched(frame: bytearray, at: int, kind: str, value: Any) -> bytearray:
    """The frame with one header field (or other place) overwritten."""
    copy = bytearray(frame)
    struct.pack_into("<" + kind, copy, at, value)
    return copy


def broken_frames(layer: int, held: list[int], not_held: int) -> dict[str, bytearray]:
    """Frames with one thing wrong each. Offsets are those of expert.proto."""
    frame = good_frame(layer, held)
    body = 96
    rows_end = body + 2 * HIDDEN * 4  # two float32 rows; already a multiple of 32
    weights = rows_end + 64  # after four row indices and four experts, each padded to 32 bytes
    return {
        "nothing": bytearray(),
        "half a header": frame[:40],
        "a header alone": frame[:96],
        "cut in the rows": frame[: body + 8],
        "cut at the end": frame[: rows_end + 4],
        "wrong magic": patched(frame, 0, "I", 0xDEADBEEF),
        "unknown kind": patched(frame, 4, "H", 9),
        "a reply": patched(frame, 4, "H", 2),
        "bfloat16 instead of float32": patched(frame, 6, "H", 3),
        "unknown dtype": patched(frame, 6, "H", 77),
        "wrong hidden size": patched(frame, 24, "I", HIDDEN // 2),
        "more rows than it carries": patched(frame, 20, "I", 1000),
        "more rows than a worker takes": patched(frame, 20, "I", 2**31),
        "more pairs than it carries": patched(frame, 28, "I", 10_000),
        "a layer that is not there": patched(frame, 16, "I", 99),
        "a row index out of range": patched(frame, rows_end, "i", 2),
        "a negative row index": patched(frame, rows_end, "i", -1),
        "an expert held elsewhere": patched(frame, rows_end + 32, "i", not_held),
        "an expert that does not exist": patched(frame, rows_end + 32, "i", 999),
        "a weight that is not a number": patched(frame, weights, "f", math.nan),
    }


def test_broken_frames_get_error_frames_and_the_stream_stays_up(router: Router, cluster: Cluster) -> None:
    with rpc.channel(cluster.processes["worker-0"].address) as channel:
        stub = expert_pb2_grpc.ExpertServiceStub(channel)
        held = stub.Describe(expert_pb2.ExpertServiceDescribeRequest(), timeout=60).layers[0]
        not_held = next(expert for expert in range(8) if expert not in held.experts)
        broken = broken_frames(held.layer, list(held.experts[:2]), not_held)
        good = bytes(good_frame(held.layer, list(held.experts[:2])))
        frames = [frame for wrong in broken.values() for frame in (bytes(wrong), good)]
        replies = stub.Forward((expert_pb2.ForwardRequest(frame=frame) for frame in frames), timeout=60)
        answers = [bytes(reply.frame) for reply in replies]
    assert len(answers) == len(frames)
    kinds = [struct.unpack_from("<H", answer, 4)[0] for answer in answers]
    assert dict(zip(broken, kinds[::2], strict=True)) == dict.fromkeys(broken, 3)
    assert set(kinds[1::2]) == {2}, "a good frame after a broken one is served"
    for name, answer in zip(broken, answers[::2], strict=True):
        text = answer[96:].rstrip(b"\0").decode()
        code = struct.unpack_from("<I", answer, 56)[0]
        assert text, name
        assert code in (3, 9), f"{name}: INVALID_ARGUMENT or FAILED_PRECONDITION, not {code}"
        assert "/" not in text, text
        assert "Traceback" not in text, text
