"""A step's rows brought from staging, in the interpreter here and on a GPU, where staging is pinned host memory."""

from __future__ import annotations

import pytest
import torch

from forefetch.kernels.staged import LINES, ref, triton

ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")])


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize(("width", "decodes", "count"), [(100, 7, 70), (64, 64, 64), (9, 0, 5), (130, 4, 2)])
def test_the_first_rows_come_and_no_others(device: str, width: int, decodes: int, count: int) -> None:
    draw = torch.Generator().manual_seed(width)
    staged = torch.randint(0, 1 << 20, (len(LINES), width), generator=draw)
    staged[LINES.index("source")] = torch.randint(-1, 5, (width,), generator=draw)
    staged = staged.pin_memory() if device == "cuda" else staged
    chosen = torch.arange(100, 105, device=device)
    results = []
    for run, where in ((triton.bring, device), (ref.bring, "cpu")):
        rows, placed = torch.full((4, width), -7, device=where), torch.full((3, decodes), -7, dtype=torch.int32, device=where)
        run(staged, chosen.to(where), rows, placed, count)
        results.append((rows.cpu(), placed.cpu()))
    (rows, placed), expected = results
    assert torch.equal(rows, expected[0])
    assert torch.equal(placed, expected[1])
    owed = staged[4, :count] >= 0
    assert torch.equal(rows[0, :count], torch.where(owed, 100 + staged[4, :count], staged[0, :count]))
    assert (rows[:, count:] == -7).all()
    assert (placed[:, count:] == -7).all()
