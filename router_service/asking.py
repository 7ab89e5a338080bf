"""GenerateRequest -> token ids and checked parameters."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forefetch.errors import BadRequest
from forefetch.v1 import router_pb2
from router_service import admission
from router_service.text import Text

Form = router_pb2.GenerateRequest | router_pb2.TokenizeRequest


@dataclass(frozen=True)
class Reader:
    """`text` is None for a checkpoint without tokenizer.json: then only token ids are taken."""

    limits: admission.Limits
    text: Text | None

    async def admit(self, request: router_pb2.GenerateRequest, before: Sequence[int] = ()) -> admission.Admitted:
        """Checks every field. `before`: tokens of the conversation that the prompt goes on with. Raises BadRequest."""
        form = request.WhichOneof("prompt") or "prompt"
        if form == "tokens":  # copied only if it fits: a message holds millions
            admission.check_length(form, len(before) + len(request.tokens.ids), self.limits)
        prompt = [*before, *await (self.following(request, before) if before else self.prompt_ids(request))]
        sampling, stop = request.sampling, request.stop
        ask = admission.Ask(
            prompt=prompt,
            form=form,
            temperature=_optional(sampling, "temperature"),
            top_k=_optional(sampling, "top_k"),
            top_p=_optional(sampling, "top_p"),
            min_p=_optional(sampling, "min_p"),
            seed=_optional(sampling, "seed"),
            max_tokens=_optional(stop, "max_tokens"),
            stop_strings=stop.strings,
            stop_token_ids=stop.token_ids,
            ignore_eos=stop.ignore_eos,
            top_logprobs=_optional(request, "top_logprobs"),
            request_id=request.request_id,
        )
        if ask.stop_strings and self.text is None:
            raise BadRequest("stop.strings", "need a tokenizer; this checkpoint has none")
        return admission.admit(ask, self.limits, seed=random.getrandbits(64), request_id=request_id(request))

    async def prompt_ids(self, request: Form) -> Sequence[int]:
        """Token ids of whichever form the prompt has; long texts are tokenised off the event loop."""
        if isinstance(request, router_pb2.GenerateRequest) and request.WhichOneof("prompt") == "tokens":
            return request.tokens.ids
        text = self._words(request)
        if request.WhichOneof("prompt") == "text":
            return await asyncio.to_thread(text.encode, request.text)
        return await asyncio.to_thread(text.chat, _turns(request))

    async def following(self, request: router_pb2.GenerateRequest, before: Sequence[int]) -> Sequence[int]:
        """The same for a prompt that goes on with a conversation of tokens `before`."""
        if request.WhichOneof("prompt") == "tokens":
            if not request.tokens.ids:
                raise BadRequest("tokens.ids", "is empty; at least one id is needed")
            return request.tokens.ids
        text = self._words(request)
        if request.WhichOneof("prompt") == "text":
            return await asyncio.to_thread(text.encode, request.text, special=False)
        return await asyncio.to_thread(text.chat_on, _turns(request), before)

    def _words(self, request: Form) -> Text:
        """The tokenizer, after bounding what it will be given."""
        form = request.WhichOneof("prompt")
        if form is None:
            raise BadRequest("prompt", "is not set; one of text, tokens or chat is needed")
        if self.text is None:
            raise BadRequest(form, "needs a tokenizer; this checkpoint has none, send token ids")
        if form == "text":
            admission.check_text(request.text, self.limits)
        else:
            admission.check_messages(len(request.chat.messages))
            admission.check_chat(_turns(request), self.limits)
        return self.text


def request_id(request: router_pb2.GenerateRequest) -> str:
    """The caller's name for the request, or one that nobody else has."""
    return request.request_id or secrets.token_hex(8)


def _turns(request: Form) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.chat.messages]


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None
