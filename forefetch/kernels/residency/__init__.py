"""Which experts sit in fast slots, kept by the device itself: kernels that look, choose and copy without the host.

`state.py` says what they share. Four launches: `enter` when a layer knows its experts, `pick` to choose copies, `bring` to
copy, `spare` to find victims for the next `pick`; `note` leaves what heads say where those find it. Several who choose copies
take turns by `grant` and `release`. An expert that is in no
slot is read in place, from host memory, or, behind `split`, from another copy.
"""

from __future__ import annotations

from forefetch.kernels.residency.launches import LEAST, bring, choose_and_enter, enter, note, pick, spare, split
from forefetch.kernels.residency.state import COUNTERS, Mover, Residents
from forefetch.kernels.residency.turns import grant, release

__all__ = [
    "COUNTERS",
    "LEAST",
    "Mover",
    "Residents",
    "bring",
    "choose_and_enter",
    "enter",
    "grant",
    "note",
    "pick",
    "release",
    "spare",
    "split",
]
