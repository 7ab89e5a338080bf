"""Steps that heads look at, and what heads said of them on its way from a GPU. Letters as in `hints.py`; D targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from forefetch.telemetry.ring import StepStamps
from router_service.batch import StepBatch
from router_service.forecast import Ints


@dataclass
class HintedStep:
    """The step that is running. `due`: layer -> kind -> experts named for it in time."""

    batch: StepBatch
    stamps: StepStamps
    rows: torch.Tensor | None  # which rows are looked at; None: all real ones
    due: dict[int, dict[int, Ints]] = field(default_factory=dict)


@dataclass(frozen=True)
class Named:
    """What heads said at one place, on its way from a GPU: experts and probabilities [D, T, M] of D targets."""

    step: HintedStep
    source: int
    kinds: Sequence[int]
    targets: Sequence[int]
    both: torch.Tensor  # [2, D, T, M] float32; ids are exact in it
    ready: torch.cuda.Event
