"""Perplexity and greedy agreement of a model whose attention reads what a KV format leaves of K and V.

A window of text goes through the model in one step, as one chunk from position 0: which tokens each position reads sealed is
the cache's own rule, so the numbers are those of decoding token by token, at the price of one forward. Predictions are put
into classes by how much they see: context c are those at positions c/2 to c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from forefetch.errors import ConfigError, UnsupportedModel
from forefetch.spec import ModelSpec
from forefetch.telemetry.ring import StepRing
from forefetch.weights import Checkpoint
from router_service.batch import PrefillRows, StepBatch
from router_service.lookahead.runner import AllExperts
from router_service.quality.cells import Cell
from router_service.quality.setups import Setup
from router_service.text import Text
from router_service.trunk import Cache, Trunk

CONTEXTS = (512, 1024, 2048, 4096)
HEAD_ROWS = 1024
"""Rows whose logits exist at a time."""


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of one text."""

    text: str
    ids: list[int]


@dataclass
class Measured:
    """Everything about one setup. Keys: context, and (context, text)."""

    setup: Setup
    cells: dict[int, Cell] = field(default_factory=dict)
    by_text: dict[tuple[int, str], Cell] = field(default_factory=dict)


class Meter:
    """A whole model in this process, in float32 on a CPU."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.spec, checkpoint = ModelSpec.load(folder), Checkpoint(folder)
        self.device = device
        plain = Setup("fp16", None)
        cache = cast("Cache", plain.cache(self.spec, 1, device))
        self._trunk_of = partial(Trunk, self.spec, checkpoint, cache, dtype=dtype, device=device)
        self.trunk = self._trunk_of()
        self._experts = AllExperts(self.spec, checkpoint, dtype, device)
        self._stamps = StepRing(1, self.spec.layers, 1)

    @cached_property
    def rounded(self) -> Trunk:
        """The trunk in 8 bits."""
        return self._trunk_of(rounded=True)

    def logits(self, setup: Setup, ids: Sequence[int]) -> Tensor:
        """Of every position of a sequence: [R, V]."""
        count, page = len(ids), setup.format.page if setup.format else 128
        trunk = self.rounded if setup.rounded else self.trunk
        trunk.cache = cast("Cache", setup.cache(self.spec, count, self.device))  # one step, never committed
        position = torch.arange(count, device=self.device)
        pages = list(range(1, 2 + count // page))
        batch = StepBatch(
            step=0,
            tokens=count,
            decodes=0,
            token_ids=torch.tensor(ids, device=self.device),
            positions=position,
            slots=position + page,
            page_table=torch.zeros((0, 1), dtype=torch.int64),
            lengths=[],
            prefills=(PrefillRows(0, count, 0, pages),),
            logit_rows=position,
        )
        return trunk.forward(batch, self._experts, self._stamps.begin(0, 0))

    def score(self, setup: Setup, window: Window) -> tuple[Tensor, Tensor]:
        """Nats of each next token, and the likeliest token, [R - 1] each."""
        return self._scored(self.logits(setup, window.ids)[:-1], window)

    def _scored(self, logits: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        targets = torch.tensor(window.ids[1:], device=self.device)
        parts = zip(torch.split(logits, HEAD_ROWS), torch.split(targets, HEAD_ROWS), strict=True)
        return torch.cat([cross_entropy(*part, reduction="none") for part in parts]), logits.argmax(-1)

    def run(
        self, setups: Sequence[Setup], windows: Sequence[Window], contexts: Sequence[int], done: Callable[[Setup], None]
    ) -> list[Measured]:
        """Every setup over every window; `done` is called after each."""
        found = [Measured(setup) for setup in setups]
        for window in windows:
            exact = self.logits(Setup("fp16", None), window.ids)[:-1]
            plain, chosen = self._scored(exact, window)
            for measured in found:
                same = measured.setup.format is None and not measured.setup.rounded
                logits = exact if same else self.logits(measured.setup, window.ids)[:-1]
                (nats, likeliest), apart = self._scored(logits, window), divergence(exact, logits)
                for context in contexts:
                    span = slice(context // 2, min(context, len(plain)))
                    part = nats[span], plain[span], likeliest[span] == chosen[span], apart[span]
                    measured.cells.setdefault(context, Cell()).add(*part)
                    measured.by_text.setdefault((context, window.text), Cell()).add(*part)
                done(measured.setup)
        return found


def divergence(exact: Tensor, logits: Tensor) -> Tensor:
    """KL of each row's prediction from the exact one, in nats: logits [R, V] each -> [R]."""
    parts = []
    for pair in zip(torch.split(exact, HEAD_ROWS), torch.split(logits, HEAD_ROWS), strict=True):
        p, q = (part.log_softmax(-1) for part in pair)
        parts.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(parts)


def windows(model: Path, texts: Sequence[Path], length: int, tokens: int) -> list[Window]:
    """Up to `tokens` tokens of each file (0: all) as windows of `length`, one behind the other. ConfigError: too short."""
    tokenizer = Text.load(model)
    if tokenizer is None:
        raise UnsupportedModel("tokenizer.json: not found in the model's folder")
    found = []
    for path in texts:
        try:
            ids = tokenizer.encode(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error.reason
            raise ConfigError(f"--text {path}: cannot be read as UTF-8 text: {why}") from None
        ids = ids[: tokens or len(ids)]
        if len(ids) < length:
            raise ConfigError(f"--text {path.name}: {len(ids)} tokens; a window of the longest context takes {length}")
        found += [Window(path.stem, ids[first : first + length]) for first in range(0, len(ids) - length + 1, length)]
    return found
