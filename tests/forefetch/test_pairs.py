from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forefetch.pairs import sort_pairs

CPU = torch.device("cpu")
some_pairs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=30)


@settings(max_examples=200)
@given(some_pairs, st.booleans())
def test_both_orders_name_every_pair_once(given_pairs: list[tuple[int, int]], by_row: bool) -> None:
    pairs = sorted(given_pairs, key=lambda pair: pair[0]) if by_row else given_pairs
    row = np.array([pair[0] for pair in pairs], dtype=np.int32)
    expert = np.array([pair[1] for pair in pairs], dtype=np.int32)
    weight = torch.arange(len(pairs), dtype=torch.float32)  # names the pair
    found = sort_pairs(row, expert, weight, 7, CPU)
    assert found.experts == sorted(set(expert.tolist()))
    assert found.counts == [expert.tolist().count(e) for e in found.experts]
    # By expert, in the order in which they came; `place` leads from the order by row to it.
    by_expert = [(e, i) for e in found.experts for i in range(len(pairs)) if expert[i] == e]
    assert found.row.tolist() == [row[i] for _, i in by_expert]
    ends = [*found.first.tolist()[1:], len(pairs)]
    for r, (begin, end) in enumerate(zip(found.first.tolist(), ends, strict=True)):
        mine = [i for i in range(len(pairs)) if row[i] == r]
        assert found.weight[begin:end].tolist() == mine
        assert [by_expert[place][1] for place in found.place[begin:end].tolist()] == mine


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        sort_pairs(np.zeros(2, np.int32), np.array([1, -1], np.int32), torch.ones(2), 1, CPU)
