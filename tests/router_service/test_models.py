"""What the engine is given to run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from forefetch.errors import Mismatch
from router_service import models
from router_service.config import RouterConfig
from router_service.layouts import LayoutBuffers
from router_service.workers import LOCAL


def test_a_local_worker_that_can_have_no_lane_leaves_the_other_links(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts of sizes that no kernel takes, or no bindings: `up --gpus` serves all the same, and says why it is slow."""

    def beside(*_: object) -> None:
        raise Mismatch("no kernel for these")

    monkeypatch.setattr(models.expert, "beside", beside)
    sizes = {"max_tokens": 8, "max_batch": 2, "max_pages": 2, "page_size": 16}
    buffers = LayoutBuffers(**sizes, device=torch.device("cpu"), buckets=(1, 2), chunk_rows=(4,))
    spec = SimpleNamespace(hidden_size=8, top_k=2, moe_layers=(0,))
    trunk = cast(Any, SimpleNamespace(spec=spec, embedding=torch.zeros(1), dtype=torch.float32))
    rows = [SimpleNamespace(address=address, link=object()) for address in (LOCAL, "w0:1")]
    config = RouterConfig(model="m", link="p2p", workers="local,w0:1")
    made = models.captured(trunk, buffers, cast(Any, SimpleNamespace(rows=rows)), config, None)
    assert made is trunk
    assert "without p2p lanes: no kernel for these" in caplog.text
    assert all(not prompt for _, prompt in buffers.layouts())
