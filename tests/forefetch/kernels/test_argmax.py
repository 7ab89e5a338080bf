"""The greedy choice, in the interpreter here and on a GPU: exactly the definition's."""

from __future__ import annotations

import pytest
import torch

from forefetch.kernels.argmax import argmax, ref, triton

ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")])
INF, NAN = float("inf"), float("nan")
ROWS = [
    ([1.0, 3.0, 3.0], 1),
    ([-0.0, 0.0, -1.0], 0),
    ([-5.0, -2.0, -INF], 1),
    ([1.0, NAN, 3.0], -1),
    ([1.0, -NAN, 3.0], -1),
    ([1.0, INF, 3.0], -1),
    ([-INF, -INF, -INF], -1),
]


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_signs_and_broken_rows(device: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([values for values, _ in ROWS], dtype=dtype, device=device)
    for run in (triton.argmax, ref.argmax, argmax):
        assert run(logits).tolist() == [expected for _, expected in ROWS]


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("width", [1, 7, 8192, 8193, 20001])
def test_every_width_and_tie(device: str, width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    wide = torch.randint(-40, 40, (5, width + 3), generator=draw).to(torch.bfloat16).to(device)
    logits = wide[:, :width]  # rows of a wider tensor, full of ties
    assert triton.argmax(logits).tolist() == ref.argmax(logits).tolist()
    with pytest.raises(ValueError, match="contiguous"):
        triton.argmax(wide[:, ::2]) if width > 1 else triton.argmax(wide.T)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_a_choice_goes_where_the_next_step_and_the_host_look(device: str) -> None:
    logits = torch.tensor([values for values, _ in ROWS], device=device)
    expected = [token for _, token in ROWS]
    for run in (triton.argmax, ref.argmax, argmax):
        chosen = torch.full((9,), -7, device=device)
        told = torch.full((9,), -7, pin_memory=device == "cuda")
        found = run(logits, (chosen, told))
        if device == "cuda":
            torch.cuda.synchronize()
        assert found.data_ptr() == told.data_ptr()
        assert told.tolist() == [*expected, -7, -7]
        assert chosen.tolist() == [*(max(0, token) for token in expected), -7, -7]
