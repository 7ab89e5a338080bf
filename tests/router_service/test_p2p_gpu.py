"""A lane between two GPUs, in and out of order: halves, a worker that stalls, one that is killed in a step. `pytest -m
multigpu`."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
MODEL, BATCH, CONTEXT = "synthetic:olmoe-1b-7b", 64, 256


def until(condition: Any, timeout: float = 20.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def test_a_lane_between_two_gpus() -> None:
    """One rig for all of it: weights and recorded steps take their time."""
    from benchmarks.p2p import buffers_of, laned, logits_of, prepared, table_of, worker_on
    from forefetch.errors import LinkDown

    with worker_on("cuda:1", MODEL, "int4") as process:
        rig = prepared(MODEL, "int4", "bfloat16", BATCH, CONTEXT)
        process.wait_ready(120.0)
        workers = table_of(rig, process, "int4")

        def step(model: Any, buffers: Any, rows: int) -> torch.Tensor:
            return logits_of(rig, model, buffers, rows, CONTEXT, number=1)

        plain_buffers, buffers = buffers_of(BATCH // 2, CONTEXT), buffers_of(BATCH, CONTEXT)
        plain = rig.recorded(plain_buffers)
        half = step(plain, plain_buffers, BATCH // 2)
        model = laned(rig, workers, BATCH, 2, buffers, patience_s=1.0)
        whole = step(model, buffers, BATCH)
        assert torch.equal(whole[: BATCH // 2], half), "a half is a step of its own, bit for bit"
        assert torch.equal(step(model, buffers, BATCH), whole)

        process.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(LinkDown, match="no signal within 1 s"):
            step(model, buffers, BATCH)
        print(f"stalled: {time.monotonic() - began:.2f} s", flush=True)
        assert time.monotonic() - began < 2.0
        process.signal(signal.SIGCONT)
        began = time.monotonic()
        until(model._up)
        print(f"up again: {time.monotonic() - began:.2f} s", flush=True)
        assert torch.equal(step(model, buffers, BATCH), whole)

        steps, killed = list[torch.Tensor](), list[float]()

        def kill() -> None:
            killed.append(time.monotonic())
            process.signal(signal.SIGKILL)

        def go_on() -> None:
            while True:
                steps.append(step(model, buffers, BATCH))

        threading.Timer(0.3, kill).start()
        with pytest.raises(LinkDown):
            go_on()
        print(f"killed after {len(steps)} steps, noticed in {time.monotonic() - killed[0]:.3f} s", flush=True)
        assert steps
        assert torch.equal(step(plain, plain_buffers, BATCH // 2), half), "the router's GPU goes on"
        model.close()
        workers.close()
