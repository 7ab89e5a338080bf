"""Which service holds what."""

from __future__ import annotations

import hashlib
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kv_service.client import chain
from router_service.segments import cut, owner, segment_of

ROOT = bytes(32)


def names(count: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % i).digest() for i in range(count)]


def test_segments_double() -> None:
    firsts = [segment_of(block, 3) for block in (0, 7, 8, 15, 16, 31, 32, 63, 64, 1000)]
    assert firsts == [(0, 0), (0, 0), (1, 8), (1, 8), (2, 16), (2, 16), (3, 32), (3, 32), (4, 64), (7, 512)]
    assert [segment_of(block, 1) for block in (0, 8, 1000)] == [(0, 0)] * 3


@given(st.integers(0, 200), st.integers(1, 5))
def test_a_cut_chain_is_the_chain(blocks: int, services: int) -> None:
    keys = chain(ROOT, [[block] for block in range(blocks)])
    runs = cut(keys, services)
    flat = [key for run in runs for key in run]
    assert flat == keys
    assert len(runs) == (min(blocks, 1) if services == 1 else len({segment_of(b, services) for b in range(blocks)}))


def test_names_spread_evenly_and_only_those_of_a_lost_service_move() -> None:
    services = ["a:1", "b:1", "c:1", "d:1"]
    before = {name: services[owner(name, services)] for name in names(4000)}
    shares = Counter(before.values())
    # Binomial: mean 1,000, deviation 27; five deviations.
    assert all(abs(shares[service] - 1000) < 137 for service in services), shares
    left = [service for service in services if service != "b:1"]
    for name, holder in before.items():
        assert left[owner(name, left)] == holder or holder == "b:1"


def test_the_order_in_which_services_are_named_does_not_matter() -> None:
    one, other = ["a:1", "b:1", "c:1"], ["c:1", "a:1", "b:1"]
    assert [one[owner(name, one)] for name in names(50)] == [other[owner(name, other)] for name in names(50)]
