"""Which experts the reference model chooses on held-out text: recorded once, replayed by slot_policies.py and expert_slots.py.

A trace is a list of documents, each [T, L, K]: for every token and MoE layer the experts' indices. Teacher forcing gives the
same choice as decoding the document token by token would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from router_service.lookahead.corpus import chunks, read_documents
from router_service.lookahead.runner import Runner
from router_service.text import Text
from router_service.trunk import Attend

Document = npt.NDArray[np.uint8]  # [T, L, K]
SEPARATOR = "<|endoftext|>"
LENGTH = 1024


@dataclass
class Watcher:
    """A trunk's observer that keeps the choices of one forward."""

    layers: list[npt.NDArray[np.uint8]] = field(default_factory=list)

    def chosen(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, attend: Attend) -> None:
        self.layers.append(ids.numpy().astype(np.uint8))

    def returned(self, layer: int, x: torch.Tensor) -> None:
        pass


def record(folder: Path, text: Path, tokens: int) -> list[Document]:
    """The choices on the first `tokens` tokens of a file, document by document."""
    runner, tokenizer = Runner(folder, sequences=1, length=LENGTH, device=torch.device("cpu")), Text(folder)
    found = []
    with torch.inference_mode():
        for chunk in chunks(tokenizer, read_documents(text, SEPARATOR), LENGTH, tokens):
            watcher = Watcher()
            runner.prefill([chunk.ids], watcher)
            found.append(np.stack(watcher.layers, axis=1))
    return found


def held_out(folder: Path, tokens: int) -> dict[str, list[Document]]:
    """`record` for each of the model's held-out texts."""
    return {path.stem: record(folder, path, tokens) for path in sorted((folder / "heldout").glob("*.txt"))}


def steps(documents: Sequence[Document], streams: int) -> Iterator[npt.NDArray[np.uint8]]:
    """[B, L, K] per decode step when `streams` documents are decoded side by side, a next one whenever one ends."""
    waiting = list(reversed(documents))
    running: list[Document] = []
    while waiting or running:
        while waiting and len(running) < streams:
            running.append(waiting.pop())
        yield np.stack([document[0] for document in running])
        running = [document[1:] for document in running if len(document) > 1]
