from __future__ import annotations

from typing import Any

import numpy as np

from models.recipe.excerpts import unshipped
from models.recipe.pack import Stream


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def test_held_out_documents_come_whole_in_order_and_without_those_that_ship() -> None:
    texts = ["first", "ships", "second", "third"]
    tokens = np.array([ord(letter) for text in texts for letter in f"{text}|"], np.uint16)
    starts = np.array([0, 6, 12, 19])
    tokenizer: Any = Letters()
    stream = Stream(tokens, starts, 0)
    assert list(unshipped(stream, tokenizer, "ships|\n", 100)) == ["first", "second", "third"]
    assert list(unshipped(stream, tokenizer, "ships|\n", 7)) == ["first", "second"]
