"""Text in, ids out, and back: the checkpoint's tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from forefetch.errors import BadRequest, UnsupportedModel
from router_service.detokenise import TextStream, pieces_of


class Text:
    """A checkpoint's tokenizer and chat template. Raises UnsupportedModel for a decoder or template that it cannot run."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._pieces = pieces_of(self._tokenizer)
        self._template = _template(folder)

    @classmethod
    def load(cls, folder: Path) -> Text | None:
        """None for a checkpoint without tokenizer.json: it takes token ids and answers with token ids."""
        return cls(folder) if (folder / "tokenizer.json").exists() else None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Plain text -> ids, special tokens added as the tokenizer does, or none."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """(role, content), oldest first -> ids of the rendered conversation plus its generation prompt. Raises BadRequest."""
        return self.encode(self._rendered(messages), special=False)

    def chat_on(self, messages: Sequence[tuple[str, str]], before: Sequence[int]) -> list[int]:
        """The same for turns that follow a conversation of tokens `before`, which ends with an assistant's answer.

        The conversation is not rendered again: its tokens stand as they are. What the template writes behind an assistant's
        content, the end of that turn included, is appended; a token that ends the turn and was generated is not repeated.
        """
        rendered = self._rendered([("user", "?"), ("assistant", _ANSWER), *messages])
        _, found, after = rendered.rpartition(_ANSWER)
        if not found:
            raise BadRequest("chat", "the chat template does not show an assistant's turn; go on with text or token ids")
        ids = self.encode(after, special=False)
        return ids[1:] if before and ids and ids[0] == before[-1] else ids

    def _rendered(self, messages: Sequence[tuple[str, str]]) -> str:
        if self._template is None:
            raise BadRequest("chat", "this checkpoint has no chat template; send text or token ids")
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, tools=None, documents=None)
        except _Refused as error:
            raise BadRequest("chat.messages", f"the chat template refuses them: {error}") from None
        except Exception:  # a template is a program: whatever it trips over, these messages made it
            raise BadRequest("chat.messages", "the chat template cannot render them") from None

    def stream(self, stops: Sequence[str]) -> TextStream:
        """The text of one answer, from its first token on."""
        return TextStream(self._pieces.decoder(), stops)


_ANSWER = "forefetch-answer-0d9f1c"
"""Stands for an assistant's content that is there as tokens; no user writes it by chance."""


class _Refused(Exception):
    """The chat template called raise_exception."""


def _refuse(message: str) -> None:
    raise _Refused(message)


def _template(folder: Path) -> jinja2.Template | None:
    """The checkpoint's chat template in the environment that transformers gives it; None when it has none."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8")) if path.exists() else {}
    file = folder / "chat_template.jinja"
    source = file.read_text("utf-8") if file.exists() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    tokens = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
    variables = tokens | {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    try:
        return environment.from_string(source, globals=variables)
    except jinja2.TemplateError as error:
        raise UnsupportedModel(f"chat template: {error.message}") from None


def _content(token: Any) -> Any:
    """A special token is written as a string or as an object with its properties."""
    return token["content"] if isinstance(token, dict) else token


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Jinja's own filter escapes for HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
