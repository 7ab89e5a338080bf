"""The same answers with router and workers on a GPU: one code path for both devices. Run with `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cluster_calls import SMALL, Router
from reference_model import CASES, Case, Oracle, build

from forefetch.cluster import Cluster, ClusterConfig, Extra

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FLOAT32 = ("--dtype=float32",)
WIDE = Case("qwen3-wide", "qwen3_moe", {**CASES["qwen3"].config, "moe_intermediate_size": 64})  # kernels take multiples of 32


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


@pytest.mark.parametrize(("link", "miss"), [("local", "wait"), ("local", "auto"), ("grpc", "auto"), ("grpc", "in-place")])
def test_half_of_the_experts_in_slots(link: str, miss: str, tmp_path: Path) -> None:
    """Moved by the host, or by the GPU itself, in a recorded step or between calls."""
    folder = build(WIDE, tmp_path)
    prompt, expected = CASES["qwen3"].prompt, Oracle(folder).greedy(CASES["qwen3"].prompt, 64)
    how = {"workers": 1, "link": link, "slots": "50%", "miss": miss, "kv": False, "port": 0, "device": "cuda", "start_s": 120.0}
    config = ClusterConfig(model=str(folder), **how)  # type: ignore[arg-type]
    with Cluster.start(config, extra=Extra(router=(*SMALL, *FLOAT32), worker=FLOAT32)) as cluster:
        router = Router(cluster.address)
        assert [router.generate(prompt, 64).tokens for _ in range(2)] == [expected] * 2
        router.close()


def test_shadowed_experts_are_counted(tmp_path: Path) -> None:
    """In steps that are recorded and in those that are not."""
    folder = build(WIDE, tmp_path)
    how = {"link": "local", "slots": "50%", "miss": "shadow", "kv": False, "port": 0, "device": "cuda", "start_s": 120.0}
    with Cluster.start(ClusterConfig(model=str(folder), **how), extra=Extra(router=(*SMALL, *FLOAT32))) as cluster:  # type: ignore[arg-type]
        router = Router(cluster.address)
        answer = router.generate(CASES["qwen3"].prompt, 32)
        named = answer.finish.approximations
        assert (len(answer.tokens), named.shadow_format) == (32, "int4")
        assert named.shadow_experts == sum(layer.shadowed for layer in router.stats().hints.layers) > 0
        router.close()
