"""The page pool against a plain model of itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_service.pages import SCRATCH, PagePool


def test_prefers_a_run_and_falls_back_to_scattered_pages() -> None:
    pool = PagePool(9)
    first, second, third = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    assert (first, second, third) == ((1, 2), (3, 4), (5, 6))
    pool.release(first or ())
    assert pool.allocate(3) == (1, 2, 7)  # no run of three is left
    assert pool.allocate(2) is None
    assert pool.free == 1


def test_scratch_page_is_never_handed_out() -> None:
    pool = PagePool(4)
    assert pool.allocate(3) == (1, 2, 3)
    assert pool.allocate(1) is None
    with pytest.raises(ValueError, match="not in use"):
        pool.release((SCRATCH,))


def test_a_pinned_page_outlives_its_owner() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1) or ()
    pool.pin(page)
    pool.release((page,))
    assert pool.free == 1
    assert pool.allocate(2) is None
    pool.unpin(page)
    assert pool.free == 2


def test_releasing_twice_is_refused() -> None:
    pool = PagePool(3)
    pages = pool.allocate(1) or ()
    pool.release(pages)
    with pytest.raises(ValueError, match="not in use"):
        pool.release(pages)


@given(st.lists(st.tuples(st.sampled_from("arpu"), st.integers(0, 9)), max_size=60))
def test_no_page_has_two_owners(actions: list[tuple[str, int]]) -> None:
    pool = PagePool(12)
    held: list[tuple[int, ...]] = []
    pins: list[int] = []
    for action, n in actions:
        if action == "a" and (pages := pool.allocate(n)) is not None:
            held.append(pages)
        elif action == "r" and held:
            pool.release(held.pop(n % len(held)))
        elif action == "p" and held and held[n % len(held)]:
            page = held[n % len(held)][0]
            pool.pin(page)
            pins.append(page)
        elif action == "u" and pins:
            pool.unpin(pins.pop(n % len(pins)))
        owned = [page for pages in held for page in pages]
        assert len(owned) == len(set(owned))
        assert SCRATCH not in owned
        assert pool.used == len({*owned, *pins})
