"""Text that grows token by token: incremental detokenisation and stop strings.

A stream's pieces are valid UTF-8, never taken back, and add up to exactly `decode(all ids)` cut before the stop string.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any, Protocol

from forefetch.errors import UnsupportedModel


class TextStream:
    """Ids in, final text out. Text that may still become a stop string is held back."""

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._decoder, self._stops = decoder, _StopStrings(stops)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; the text before it has been returned."""
        return self._stops.matched

    def push(self, token_id: int) -> str:
        """Text that became final with this token; nothing once stopped."""
        return self._stops.push(self._decoder.push(token_id))

    def finish(self) -> str:
        """What was held back. A stop string may still match: an open character has become U+FFFD."""
        return self._stops.push(self._decoder.flush()) + self._stops.flush()


class _StopStrings:
    """Finds the stop string that ends first in the text (the longest, if several end there), however the text is cut.

    One Knuth-Morris-Pratt automaton per string: its state is how much of the string the text ends with, so the longest
    state is exactly the text that must be held back, and a character costs O(1) amortised per string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self._stops = [(stop, _borders(stop)) for stop in dict.fromkeys(stops)]
        self._states = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> str:
        """Text that is known to lie before any stop string."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        for end in range(len(self._held), len(text)):
            if match := self._advance(text[end]):
                self.matched, self._held = match, ""
                return text[: end + 1 - len(match)]
        final = len(text) - max(self._states)
        self._held = text[final:]
        return text[:final]

    def flush(self) -> str:
        """The text held back: no more will come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str:
        """Moves every automaton by one character -> the longest string that is complete now, or ""."""
        found = ""
        for i, (stop, borders) in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != char:
                state = borders[state - 1]
            state += stop[state] == char
            self._states[i] = state
            if state == len(stop) > len(found):
                found = stop
        return found


def _borders(string: str) -> list[int]:
    """For each prefix of `string` the length of its longest proper suffix that is also its prefix."""
    borders = [0] * len(string)
    state = 0
    for i in range(1, len(string)):
        while state and string[state] != string[i]:
            state = borders[state - 1]
        state += string[state] == string[i]
        borders[i] = state
    return borders


class Decoder(Protocol):
    """Incremental detokenisation of one answer."""

    def push(self, token_id: int) -> str:
        """Text that is final now."""

    def flush(self) -> str:
        """The rest, when no token follows."""


class BytePieces:
    """Byte-level BPE: every token is a run of bytes. At most the 3 bytes of an open character are held."""

    def __init__(self, tokenizer: Any, special: frozenset[int]) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._known: dict[int, bytes] = {}

    def decoder(self) -> Decoder:
        """For one answer."""
        return _ByteDecoder(self)

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._known.get(token_id)
        if piece is None:
            piece = self._known[token_id] = self._look_up(token_id)
        return piece

    def _look_up(self, token_id: int) -> bytes:
        token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
        if token is None:  # ids between the tokenizer's and the model's vocabulary size have no text
            return b""
        # An added token with other characters stands for its own text.
        return bytes(map(_BYTE_OF.__getitem__, token)) if _BYTE_OF.keys() >= set(token) else token.encode()


class _ByteDecoder:
    def __init__(self, pieces: BytePieces) -> None:
        self._pieces, self._utf8 = pieces, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._pieces[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


def _bytes_of_characters() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE uses for bytes (GPT-2's table), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _bytes_of_characters()


class UnitPieces:
    """Decoders that work token by token (SentencePiece's among them); only the first one's text differs, by a blank.

    A run of byte tokens is one unit: the tokenizer turns all of it into U+FFFD when any of it is no UTF-8, so it is held
    until the run ends.
    """

    def __init__(self, tokenizer: Any, special: frozenset[int], byte_fallback: bool) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._bytes = {tokenizer.token_to_id(f"<0x{b:02X}>") for b in range(256)} - {None} if byte_fallback else set()
        ordinary = (i for i in range(tokenizer.get_vocab_size()) if i not in special and i not in self._bytes)
        self._anchor = next(i for i in ordinary if tokenizer.id_to_token(i))
        self._known: dict[int, str] = {}

    def decoder(self) -> Decoder:
        """For one answer."""
        return _UnitDecoder(self)

    def silent(self, token_id: int) -> bool:
        """Whether the id has no text."""
        return token_id in self._special or self._tokenizer.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Whether the id stands for one byte."""
        return token_id in self._bytes

    def first(self, unit: list[int]) -> str:
        """Text of the unit that begins the answer."""
        return str(self._tokenizer.decode(unit))

    def later(self, unit: list[int]) -> str:
        """Text of any other unit: what it adds to an ordinary token."""
        if len(unit) == 1 and (known := self._known.get(unit[0])) is not None:
            return known
        text = self.first([self._anchor, *unit])[len(self.first([self._anchor])) :]
        if len(unit) == 1:
            self._known[unit[0]] = text
        return text


class _UnitDecoder:
    def __init__(self, pieces: UnitPieces) -> None:
        self._pieces, self._run, self._text_of = pieces, list[int](), pieces.first

    def push(self, token_id: int) -> str:
        if self._pieces.silent(token_id):
            return ""
        if self._pieces.is_byte(token_id):
            self._run.append(token_id)
            return ""
        return self.flush() + self._unit([token_id])

    def flush(self) -> str:
        run, self._run = self._run, []
        return self._unit(run) if run else ""

    def _unit(self, unit: list[int]) -> str:
        text = self._text_of(unit)
        self._text_of = self._pieces.later
        return text


def pieces_of(tokenizer: Any) -> BytePieces | UnitPieces:
    """What ids stand for, by the tokenizer's decoder. Raises UnsupportedModel for one whose text depends on later tokens."""
    special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    decoder = json.loads(tokenizer.to_str())["decoder"] or {"type": "Sequence", "decoders": []}
    chain = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in chain]
    if kinds == ["ByteLevel"]:
        return BytePieces(tokenizer, special)
    token_wise = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}.issuperset(kinds)
    fused = kinds[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []
    strips_one = all(step["start"] <= 1 and step["stop"] == 0 for step in chain if step["type"] == "Strip")
    if not (token_wise and {"Strip"}.issuperset(fused) and strips_one):
        raise UnsupportedModel(f"tokenizer.json: text of decoder {' + '.join(kinds)} cannot be streamed")
    return UnitPieces(tokenizer, special, "ByteFallback" in kinds)
