"""A runner per tiny checkpoint, random sequences, and a Trained without training."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from router_service.lookahead.corpus import Chunk
from router_service.lookahead.runner import Runner
from router_service.lookahead.store import Trained

SEQUENCES, LENGTH = 4, 48


@pytest.fixture(scope="session")
def runner(checkpoint: Callable[[str], Path]) -> Callable[[str], Runner]:
    """runner("qwen3") -> that case's model in this process."""

    @cache
    def load(case: str) -> Runner:
        return Runner(checkpoint(case), sequences=SEQUENCES, length=LENGTH, device=torch.device("cpu"))

    return load


@pytest.fixture(scope="session")
def sequences() -> list[Chunk]:
    """Four documents of random tokens, of different lengths."""
    draw = torch.Generator().manual_seed(3)
    lengths = (LENGTH, 7, 1, 33)
    return [Chunk(f"{i:064x}", torch.randint(4, 320, (n,), generator=draw).tolist()) for i, n in enumerate(lengths)]


@pytest.fixture(scope="session")
def untrained() -> Callable[[Runner], Trained]:
    """Random mean outputs and loads; no heads."""

    def make(runner: Runner) -> Trained:
        draw, spec = torch.Generator().manual_seed(4), runner.spec
        outputs = {n: torch.randn(spec.num_experts, spec.hidden_size, generator=draw) for n in spec.moe_layers}
        return Trained(outputs, {n: torch.rand(spec.num_experts, generator=draw) for n in spec.moe_layers})

    return make
