"""Where to compute an expert that is not in its slot: in a slot, once its copy has come, or on the host, where its weights are.

Both ways work at the same time, copies one after the other and the host one expert after the other. So the experts with the
fewest pairs go to the host, as many as let the later of the two end soonest. Pure; fed with measured times.
"""

from __future__ import annotations

from collections.abc import Sequence

_NEWEST = 0.1  # share of the newest measurement in an average


class MissTimes:
    """What missing experts cost. Times in ns; unmeasured ones are zero, so that each way is tried."""

    def __init__(self) -> None:
        self.host_expert_ns = self.host_pair_ns = 0.0

    def computed(self, pairs: int, ns: int) -> None:
        """One expert's `pairs` were computed on the host. What a single pair takes counts as the expert's share (its weights
        are read), what more of them take beyond that as the pairs'."""
        if pairs <= 1:
            self.host_expert_ns += (_NEWEST if self.host_expert_ns else 1.0) * (ns - self.host_expert_ns)
        else:
            each = max(ns - self.host_expert_ns, 0.0) / pairs
            self.host_pair_ns += (_NEWEST if self.host_pair_ns else 1.0) * (each - self.host_pair_ns)

    def host_ns(self, pairs: int) -> float:
        """Expected time of an expert with so many pairs on the host."""
        return self.host_expert_ns + self.host_pair_ns * max(pairs - 1, 0)

    def on_host(self, pairs: Sequence[int], copy_ns: float, under_way: int) -> list[int]:
        """Places in `pairs` (of each missing expert) that are best computed on the host.

        copy_ns: time of one copy; under_way: copies that come before these.
        """
        order = sorted(range(len(pairs)), key=lambda place: pairs[place])
        host, copies, best, cut = 0.0, float(under_way + len(pairs)), copy_ns * (under_way + len(pairs)), 0
        for count, place in enumerate(order, start=1):
            host += self.host_ns(pairs[place])
            copies -= 1
            end = max(host, copy_ns * copies)
            if end < best:
                best, cut = end, count
        return sorted(order[:cut])
