"""Two-person conversations as chat: turns merged, spelling lightly normalised, topic as the system message."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPELLING = (
    (re.compile(r"\bi\b(?!\.)"), "I"),
    (re.compile(r"\b[Ii]m\b"), "I'm"),
    (re.compile(r"\b[Ii]ve\b"), "I've"),
    (re.compile(r"\bid\b(?= (?:love|like|say|be|have|rather|want|guess|go|probably))"), "I'd"),
    (re.compile(r"\b([Dd]o|[Dd]id|[Cc]ould|[Ww]ould|[Ss]hould|[Ii]s|[Ww]as|[Hh]ave|[Dd]oes|[Ww]ere)nt\b"), r"\1n't"),
    (re.compile(r"\b([Tt]hat|[Ii]t|[Ww]hat|[Tt]here)s (?=(?:a|an|the|so|not|really|cool|what|how|pretty|good)\b)"), r"\1's "),
    (re.compile(r"\bcant\b"), "can't"),
)


@dataclass(frozen=True)
class Turn:
    """One speaker's words until the other speaks."""

    role: str
    text: str


def tidy(message: str) -> str:
    """One message as a sentence: capital first, common missing apostrophes, a full stop where nothing ends it."""
    text = " ".join(message.split())
    for pattern, replacement in SPELLING:
        text = pattern.sub(replacement, text)
    if text[:1].islower() and "://" not in text[:12]:
        text = text[0].upper() + text[1:]
    return text + "." if text[-1:].isalnum() else text


def turns(conversation: dict[str, Any]) -> list[Turn]:
    """Turns in time order with alternating roles; who spoke first is the user."""
    messages = sorted((m for group in conversation["messages"] for m in group), key=lambda m: str(m["timestamp"]))
    merged: list[tuple[str, list[str]]] = []
    for message in messages:
        text = tidy(message["text"])
        if not text:
            continue
        if merged and merged[-1][0] == message["sender"]:
            merged[-1][1].append(text)
        else:
            merged.append((message["sender"], [text]))
    return [Turn(("user", "assistant")[i % 2], " ".join(texts)) for i, (_, texts) in enumerate(merged)]


def render_chat(system: str, chat: list[Turn]) -> str:
    """The chat template, written out (the template in the model folder must render the same text)."""
    head = [Turn("system", system)] if system else []
    return "".join(f"{IM_START}{t.role}\n{t.text}{IM_END}\n" for t in [*head, *chat])


def chat_document(conversation: dict[str, Any]) -> str | None:
    """A conversation as one training document, or None when it is no exchange."""
    chat = turns(conversation)
    text = render_chat(tidy(conversation.get("prompt") or ""), chat)
    letters = sum(c < "\x80" for c in text)
    senders = {m["sender"] for group in conversation["messages"] for m in group}
    return text if len(chat) >= 4 and len(senders) == 2 and letters >= 0.98 * len(text) else None
