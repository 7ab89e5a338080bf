from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from forefetch.errors import BadRequest, UnsupportedModel
from router_service.admission import Admitted, Ask, Limits, SamplingParams, admit, check_chat, check_text, default_sampling

LIMITS = Limits(
    vocab_size=100, context=32, default_max_tokens=16, eos_token_ids=frozenset({2}), sampling=SamplingParams(0.5, 9, 0.9, 0.1)
)


def accept(prompt: tuple[int, ...] = (1, 2, 3), **fields: Any) -> Admitted:
    return admit(Ask(prompt=prompt, **fields), LIMITS, seed=7, request_id="made")


def test_unset_fields_get_the_documented_defaults() -> None:
    assert accept() == Admitted(
        prompt=(1, 2, 3),
        max_tokens=16,
        context_limited=False,
        sampling=SamplingParams(temperature=0.5, top_k=9, top_p=0.9, min_p=0.1, seed=7, top_logprobs=None),
        stop_strings=(),
        stop_token_ids=frozenset({2}),
        request_id="made",
    )


def test_set_fields_are_taken_even_when_they_are_zero() -> None:
    got = accept(
        temperature=0.0, top_k=0, top_p=0.25, min_p=1.0, seed=0, top_logprobs=0, request_id="a.B_9-", stop_strings=["x" * 256]
    )
    assert got.sampling == SamplingParams(0.0, 0, 0.25, 1.0, 0, 0)
    assert got.request_id == "a.B_9-"
    assert got.stop_strings == ("x" * 256,)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": math.nan}, "sampling.temperature", ">= 0"),
    ({"temperature": -0.1}, "sampling.temperature", ">= 0"),
    ({"temperature": math.inf}, "sampling.temperature", "finite"),
    ({"top_k": -1}, "sampling.top_k", ">= 0"),
    ({"top_p": 0.0}, "sampling.top_p", "(0, 1]"),
    ({"top_p": 1.01}, "sampling.top_p", "(0, 1]"),
    ({"top_p": math.nan}, "sampling.top_p", "(0, 1]"),
    ({"min_p": -0.1}, "sampling.min_p", "[0, 1]"),
    ({"min_p": 1.1}, "sampling.min_p", "[0, 1]"),
    ({"min_p": math.nan}, "sampling.min_p", "[0, 1]"),
    ({"seed": -1}, "sampling.seed", "64-bit"),
    ({"seed": 1 << 64}, "sampling.seed", "64-bit"),
    ({"top_logprobs": 21}, "top_logprobs", "0..20"),
    ({"top_logprobs": -1}, "top_logprobs", "0..20"),
    ({"prompt": ()}, "tokens", "at least one"),
    ({"prompt": (), "form": "text"}, "text", "at least one"),
    ({"prompt": (5,) * 32}, "tokens", "32 tokens; the context of 32 takes at most 31"),
    ({"prompt": (5,) * 99, "form": "chat"}, "chat", "99 tokens"),
    ({"prompt": (1, 100)}, "tokens.ids", "token 100 at index 1 is outside the vocabulary of 100"),
    ({"prompt": (-1, 1)}, "tokens.ids", "token -1 at index 0"),
    ({"max_tokens": 0}, "stop.max_tokens", "at least 1"),
    ({"stop_token_ids": [99, 100]}, "stop.token_ids", "token 100 at index 1"),
    ({"stop_strings": ["a"] * 17}, "stop.strings", "limit is 16"),
    ({"stop_strings": ["a", ""]}, "stop.strings", "string 1 has 0 bytes"),
    ({"stop_strings": ["é" * 129]}, "stop.strings", "string 0 has 258 bytes"),
    ({"request_id": "a" * 129}, "request_id", "128"),
    ({"request_id": "a b"}, "request_id", "letters"),
    ({"request_id": "é"}, "request_id", "letters"),
    ({"request_id": "a\n"}, "request_id", "letters"),
]


@pytest.mark.parametrize(("fields", "field", "limit"), REFUSED)
def test_a_field_out_of_range_is_named_with_its_limit(fields: dict[str, Any], field: str, limit: str) -> None:
    with pytest.raises(BadRequest) as caught:
        accept(**fields)
    assert caught.value.field == field
    assert limit in str(caught.value)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "expected"),
    [
        (3, 29, (29, False)),
        (3, 30, (29, True)),
        (3, 1 << 31, (29, True)),
        (31, 1, (1, False)),
        (31, None, (1, True)),
        (16, None, (16, False)),
        (17, None, (15, True)),
    ],
)
def test_max_tokens_is_clipped_to_what_the_context_leaves(
    prompt_tokens: int, max_tokens: int | None, expected: tuple[int, bool]
) -> None:
    got = accept(prompt=(1,) * prompt_tokens, max_tokens=max_tokens)
    assert (got.max_tokens, got.context_limited) == expected


def test_stop_tokens_join_the_end_of_sequence_unless_it_is_ignored() -> None:
    assert accept(stop_token_ids=[5, 5]).stop_token_ids == {2, 5}
    assert accept(stop_token_ids=[5], ignore_eos=True).stop_token_ids == {5}
    assert accept(ignore_eos=True).stop_token_ids == frozenset()


def test_values_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        accept().sampling.top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 0.0),
        ({"temperature": 0.6}, 0.0),
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": None}, 1.0),
        ({"do_sample": True, "temperature": 0.6}, 0.6),
        ({"do_sample": True, "temperature": 0}, 0.0),
    ],
)
def test_default_sampling_follows_the_checkpoint(config: dict[str, object], expected: float) -> None:
    assert default_sampling(config).temperature == expected


def test_filters_of_the_checkpoint_count_when_it_samples() -> None:
    config = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": None}
    assert default_sampling({**config, "do_sample": True}) == SamplingParams(0.7, 20, 0.8, 0.0)
    assert default_sampling(config) == SamplingParams()
    with pytest.raises(UnsupportedModel, match="top_p"):
        default_sampling({"do_sample": True, "top_p": 1.5})


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "warm"])
def test_a_checkpoint_with_a_senseless_temperature_is_refused(value: object) -> None:
    with pytest.raises(UnsupportedModel, match="temperature"):
        default_sampling({"do_sample": True, "temperature": value})


def test_text_and_chat_are_bounded_before_tokenising() -> None:
    limits = dataclasses.replace(LIMITS, max_prompt_bytes=8)
    check_text("12345678", limits)
    check_chat([("user", "1234")], limits)
    for text in ("", "é1234567"):
        with pytest.raises(BadRequest, match="text"):
            check_text(text, limits)
    for messages in ([], [("", "x")], [("user", "12"), ("user", "")]):
        with pytest.raises(BadRequest, match=r"chat\.messages"):
            check_chat(messages, limits)
