"""Calls to send to a worker, and the answers to expect."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expert_worker import client
from expert_worker.links import Link
from forefetch import shm
from forefetch.spec import ModelSpec
from forefetch.weights import Checkpoint
from forefetch.wire import LayerCall

WIRED = [pytest.param("shm", marks=pytest.mark.skipif(bool(shm.unsupported()), reason=shm.unsupported())), "grpc"]


class Model:
    """The checkpoint that the workers serve, and a worker of it in this process to compare with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.spec, self.digest = folder, ModelSpec.load(folder), Checkpoint(folder).digest
        self._local = client.local(client.ExpertConfig(model=str(folder)))
        self._seeds = itertools.count()

    def call(self, rows: int = 5) -> LayerCall:
        seed = next(self._seeds)
        draw = torch.Generator().manual_seed(seed)
        layer = self.spec.moe_layers[seed % len(self.spec.moe_layers)]
        expert = torch.randint(self.spec.num_experts, (2 * rows,), generator=draw, dtype=torch.int32)
        row = torch.arange(rows, dtype=torch.int32).repeat_interleave(2)
        x = torch.randn(rows, self.spec.hidden_size, generator=draw)
        return LayerCall(seed, layer, x, row.numpy(), expert.numpy(), torch.rand(2 * rows, generator=draw).numpy())

    def answer(self, call: LayerCall) -> Tensor:
        self._local.submit(call)
        return self._local.collect(1.0).rows

    def connect(self, address: str, link: str, **changes: Any) -> client.Link:
        agreed = {
            "digest": self.digest,
            "hidden": self.spec.hidden_size,
            "dtype": torch.float32,
            "max_rows": 64,
            "tls": None,
            "timeout_s": 60.0,
        }
        return client.connect(address, link=link, **{**agreed, **changes})


def check(link: Link, model: Model, call: LayerCall) -> None:
    """The link's answer to a call is the model's."""
    link.submit(call)
    reply = link.collect(60.0)
    torch.testing.assert_close(reply.rows, model.answer(call), rtol=1e-5, atol=1e-5)
    assert reply.rows.dtype == call.x.dtype
    assert 0 < reply.compute_ns < reply.round_trip_ns
