from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from router_service.lookahead.codes import GROUP, eight_bits, four_bits, values_of

sizes = st.tuples(st.integers(1, 5), st.integers(1, 3 * GROUP + 1))


@given(sizes, st.integers(0, 99), st.sampled_from((1e-4, 1.0, 300.0)))
def test_four_bits_err_by_half_a_step_or_by_what_clipping_saves(size: tuple[int, int], seed: int, spread: float) -> None:
    values = spread * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    codes, scale = four_bits(values)
    groups = -(-size[1] // GROUP)
    assert codes.shape == (size[0], groups * GROUP // 2)
    assert scale.shape == (size[0], groups)
    back = values_of(codes, scale, size[1])
    assert back.shape == values.shape
    error = torch.nn.functional.pad((back - values).square(), (0, -size[1] % GROUP)).view(*scale.shape, GROUP).sum(-1)
    largest = torch.nn.functional.pad(values.abs(), (0, -size[1] % GROUP)).view(*scale.shape, GROUP).amax(-1)
    step = largest / 7
    # Half a step each at most when nothing is clipped; the scale is float16, hence the slack.
    assert bool((error <= GROUP * (0.51 * step).square() + 1e-12).all())


@pytest.mark.parametrize("pack", [eight_bits, four_bits])
def test_what_codes_can_say_comes_back_exactly(pack: object) -> None:
    limit = 127 if pack is eight_bits else 7
    values = 0.5 * torch.randint(-limit, limit + 1, (3, GROUP)).float()
    values[:, 0] = 0.5 * limit
    codes, scale = pack(values)  # type: ignore[operator]
    torch.testing.assert_close(values_of(codes, scale, GROUP), values, rtol=0, atol=0)


def test_zeros_stay_zeros() -> None:
    for pack in (eight_bits, four_bits):
        assert not values_of(*pack(torch.zeros(2, 5)), 5).any()
