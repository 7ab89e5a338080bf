"""The same answers with router and workers on a GPU: one code path for both devices. Run with `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cluster_calls import SMALL, Router
from reference_model import CASES, Oracle

from forefetch.cluster import Cluster, ClusterConfig, Extra

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FLOAT32 = ("--dtype=float32",)


@pytest.mark.parametrize(
    ("case", "link", "workers", "slots"),
    [("qwen3", "local", 1, "100%"), ("qwen2-shared", "shm", 2, "100%"), ("granite", "grpc", 3, "50%")],
)
def test_64_greedy_tokens_equal_on_a_gpu(
    case: str, link: str, workers: int, slots: str, checkpoint: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    """Families and flags are covered in one process by tests/router_service/test_trunk.py."""
    config = ClusterConfig(
        model=str(checkpoint(case)), workers=workers, link=link, slots=slots, kv=False, port=0, device="cuda", start_s=120.0
    )
    prompt, expected = CASES[case].prompt, oracle(case).greedy(CASES[case].prompt, 64)
    with Cluster.start(config, extra=Extra(router=(*SMALL, *FLOAT32), worker=FLOAT32)) as cluster:
        router = Router(cluster.address)
        assert router.generate(prompt, 64).tokens == expected
        assert router.describe().device.startswith("cuda")
        router.close()
