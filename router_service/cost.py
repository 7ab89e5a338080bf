"""Load a cached prefix, or compute it again? Pure: what was measured comes in as arguments.

Both sides are rates over recent work: tokens per second of prefill, bytes per second of loads (waiting included). A load is
worth it when it takes less time than computing the tokens it saves. Before both are known, loading is tried, which measures
it; and one load in `PROBE` that does not seem worth it is made all the same, so that a service that became faster is noticed.
That is decided twice: before services are asked, and when they have said how much of it lies on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PROBE = 16
PATIENCE = 2.0
"""A load is given up when it takes this many times as long as computing would."""
LEAST_S = 0.25
"""But not before this: small estimates are mostly noise."""


@dataclass(slots=True)
class Rate:
    """Amount per second over recent observations, large ones counting more. `keep`: what an observation leaves of the past."""

    keep: float = 0.8
    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """One observation."""
        self.amount = self.keep * self.amount + amount
        self.seconds = self.keep * self.seconds + seconds

    def time(self, amount: float) -> float | None:
        """Seconds that `amount` would take; None while nothing is known."""
        return amount * self.seconds / self.amount if self.amount > 0 and self.seconds > 0 else None


@dataclass(slots=True)
class Probe:
    """Lets one in `PROBE` of those in a row through that are not worth it."""

    refused: int = 0  # in a row

    def passes(self, worth: bool) -> bool:
        """Whether this one goes ahead."""
        self.refused = 0 if worth else (self.refused + 1) % PROBE
        return self.refused == 0


@dataclass(slots=True)
class FetchCost:
    """Decides for one router. `load` is the rate of what services have in memory, `disk` of what they read from disk first.
    `timeout_s` bounds every load."""

    block_bytes: int
    page_size: int
    timeout_s: float
    rows_bytes: int = 0  # loaded beside the blocks
    prefill: Rate = field(default_factory=Rate)
    load: Rate = field(default_factory=Rate)
    disk: Rate = field(default_factory=Rate)
    before: Probe = field(default_factory=Probe)  # services are asked
    after: Probe = field(default_factory=Probe)  # they have answered

    def worth(self, blocks: int, on_disk: int = 0) -> bool:
        """Whether loading so many blocks, of which some are on disk, is faster than computing them, or not known yet."""
        compute, load = self.prefill.time(blocks * self.page_size), self._time(blocks, on_disk)
        return compute is None or load is None or load < compute

    def loaded(self, blocks: int, on_disk: int, seconds: float) -> None:
        """So many blocks, of which some were on disk, and the rows beside them took so long; -1: nothing came."""
        if not on_disk:
            self.load.add(self._bytes(blocks) if blocks >= 0 else 0, seconds)
            return
        rest = self._bytes(blocks - on_disk) if blocks > on_disk else 0
        usual = self.load.time(rest) or 0.0 if rest else 0.0
        self.disk.add(on_disk * self.block_bytes, max(seconds - usual, seconds * on_disk / blocks))

    def _time(self, blocks: int, on_disk: int) -> float | None:
        """None while a rate that matters is not known."""
        disk = self.disk.time(on_disk * self.block_bytes) if on_disk else 0.0
        memory = self.load.time(self._bytes(blocks - on_disk)) if blocks > on_disk else 0.0
        return None if disk is None or memory is None else disk + memory

    def _bytes(self, blocks: int) -> int:
        return blocks * self.block_bytes + self.rows_bytes

    def limit_s(self, blocks: int) -> float:
        """Seconds after which loading so many blocks is given up."""
        compute = self.prefill.time(blocks * self.page_size)
        return self.timeout_s if compute is None else min(self.timeout_s, max(LEAST_S, PATIENCE * compute))
