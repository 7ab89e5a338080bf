"""Which experts sit in fast slots, kept by the device itself: kernels that look, choose and copy without the host.

`state.py` says what they share. Three launches: `enter` when a layer knows its experts, `pick` to choose copies and victims,
`bring` to copy; `note` leaves what heads say where those find it. An expert that is in no slot is read in place, from host
memory.
"""

from __future__ import annotations

from forefetch.kernels.residency.launches import LEAST, bring, choose_and_enter, enter, note, pick
from forefetch.kernels.residency.state import COUNTERS, Residents

__all__ = ["COUNTERS", "LEAST", "Residents", "bring", "choose_and_enter", "enter", "note", "pick"]
